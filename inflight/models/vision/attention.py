"""`attend`: the attention of a vision tower, in which the patches of a segment (a frame, or a window of it) see each other.

On processors with AVX-512, but without AMX, the C++ kernel of paged attention computes it: the keys and values of a segment are
one block of a cache that lasts for a layer. Elsewhere torch's `scaled_dot_product_attention` is faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, AttentionParams, AttentionStep, HeadLayout
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.limits import BLOCK_SIZE_MULTIPLE, HEAD_DIM_MULTIPLE
from inflight.kernels.layer_ops import LayerOps

# Measured: 1.1 to 1.3 times as fast as torch, with the instructions for bfloat16 1.9 to 2.2 times; with AVX2 0.86 times
_INSTRUCTION_SETS = ("avx512", "avx512_bf16")


@dataclass(slots=True)
class Heads:
    """Of a layer: [num_patches, num_heads, head_dim] each. `cells`: keys and values as the kernel reads them; None until they
    are needed."""

    query: Tensor
    key: Tensor
    value: Tensor
    cells: Tensor | None = None


def attend(
    ops: LayerOps, heads: Heads, segments: Sequence[int], first: int, last: int, *, scale: float | None = None
) -> Tensor:
    """Attention of the patches [first, last) to all patches of their segments, in both directions: [last - first, num_heads *
    head_dim]. `segments` are the numbers of patches of the segments, in the order of the patches. `scale` multiplies the
    scores; None: it is 1 / sqrt(head_dim)."""
    if isinstance(ops, CpuLayerOps) and ops.kernels.instruction_set in _INSTRUCTION_SETS:
        return attend_with_kernel(ops, heads, segments, first, last, scale=scale)
    return _attend_with_torch(heads, segments, first, last, scale)


def attend_with_kernel(
    ops: CpuLayerOps, heads: Heads, segments: Sequence[int], first: int, last: int, *, scale: float | None = None
) -> Tensor:
    """See `attend`. The first call for these heads writes all keys and values, whichever patches it is for."""
    num_patches, num_heads, head_dim = heads.query.shape
    lengths = np.asarray(segments, dtype=np.int32)
    ends = lengths.cumsum()
    counts = (np.minimum(ends, last) - np.maximum(ends - lengths, first)).clip(min=0)  # queries of each segment
    query = _padded(heads.query[first:last])
    out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
    factor = head_dim**-0.5 if scale is None else scale
    is_new = heads.cells is None
    if is_new:
        block_size = -(-int(lengths.max()) // BLOCK_SIZE_MULTIPLE) * BLOCK_SIZE_MULTIPLE
        shape = len(lengths), 2 * num_heads, block_size, query.shape[2]
        heads.cells = torch.empty(shape, dtype=query.dtype, device="cpu")
    if is_new and last - first < num_patches:  # without queries: the call only writes
        _call_kernel(ops, heads, query[:, :0], out, lengths, lengths, factor, writes=True)
        is_new = False
    _call_kernel(ops, heads, query, out, lengths, counts, factor, writes=is_new)
    return out[:, :, :head_dim].flatten(1)


def _call_kernel(
    ops: CpuLayerOps,
    heads: Heads,
    query: Tensor,
    out: Tensor,
    lengths: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    scale: float,
    *,
    writes: bool,
) -> None:
    """`query`: for `counts` patches of each segment. It does not matter which of them, so they are given as the last ones. With
    `writes`, these are all patches."""
    cells = heads.cells
    assert cells is not None
    num_segments, _, block_size, head_dim = cells.shape
    num_heads = heads.key.shape[1]
    key, value = (_padded(heads.key), _padded(heads.value)) if writes else (None, None)
    given = [each for each in (query, key, value) if each is not None]
    fits = (
        all(each.stride(2) == 1 and each.stride(1) == head_dim and each.dtype == cells.dtype for each in given)
        and all(each.shape == (int(lengths.sum()), num_heads, head_dim) for each in given[1:])
        and (len(query) == len(out) == counts.sum() or not query.shape[1])
        and num_segments == len(lengths)
    )
    require(fits, "attention of patches needs heads side by side, of segments that are all patches", *given, cells)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    num_before = (lengths - counts).astype(np.int32)
    table = np.arange(num_segments, dtype=np.int32)  # each segment has the block with its number
    arrays = starts, lengths, num_before, table
    step = AttentionStep(num_segments, block_size, 0, 1, *(each.ctypes.data for each in arrays), 0, 0, None)
    dtype = DTYPES[cells.dtype]
    block_bytes = cells.stride(0) * cells.element_size()
    layout = HeadLayout(query.shape[1], num_heads, head_dim, head_dim, dtype, dtype, block_bytes)
    ops.kernels.inflight_paged_attention(
        query.data_ptr(),
        query.stride(0),
        None if key is None else key.data_ptr(),
        0 if key is None else key.stride(0),
        None if value is None else value.data_ptr(),
        0 if value is None else value.stride(0),
        out.data_ptr(),
        cells.data_ptr(),
        step,
        layout,
        AttentionParams(scale, 0.0, None, None, 0, 0, 0),
    )


def _padded(heads: Tensor) -> Tensor:
    """Heads of a size that the kernel takes. The zeros change no score, and the values behind them are cut off."""
    padding = -heads.shape[2] % HEAD_DIM_MULTIPLE
    return F.pad(heads, (0, padding)) if padding else heads


def _attend_with_torch(heads: Heads, segments: Sequence[int], first: int, last: int, scale: float | None) -> Tensor:
    parts = []
    begin = 0
    for length, group in groupby(segments):
        end = begin + length * len(list(group))
        low, high = max(begin, first), min(end, last)
        if low < high and (low - begin) % length == (high - begin) % length == 0:
            parts.append(_attend_to(heads, slice(low, high), slice(low, high), (high - low) // length, scale))
        elif low < high:
            for start in range(begin + (low - begin) // length * length, high, length):
                queries = slice(max(low, start), min(high, start + length))
                parts.append(_attend_to(heads, queries, slice(start, start + length), 1, scale))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_to(heads: Heads, queries: slice, keys: slice, count: int, scale: float | None) -> Tensor:
    """`count` neighbouring segments of equal length at once."""
    given = heads.query[queries], heads.key[keys], heads.value[keys]
    query, key, value = (each.view(count, -1, *each.shape[1:]).transpose(1, 2) for each in given)
    attended = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1).flatten(1)
