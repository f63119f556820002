"""Reductions over the vocabulary: the sum that normalises the softmax, the most probable tokens in order.

On a CPU, `softmax_mass` and `top_tokens` handle as many rows at a time as fit a core's cache. With temporary tensors as large
as all logits, they would need three times as long. A row's result does not depend on the other rows.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 128 * 1024  # half a megabyte of float32: temporaries stay in a core's second-level cache
_NAN_BITS = 0x7FC00000  # the bits of a NaN in float32, without a sign


def row_chunks(values: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of `values`, [n, m]. On a CPU a slice has as many rows as fit the cache, elsewhere all."""
    num_rows, width = values.shape
    step = max(1, CHUNK_ELEMENTS // width) if values.device.type == "cpu" else max(1, num_rows)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def softmax_mass(logits: Tensor) -> Tensor:
    """The sum of exp(logit - max) of each row, float32 [n, 1]. This sum is 1 divided by the largest probability."""
    mass = logits.new_empty(len(logits), 1)
    for rows in row_chunks(logits):
        torch.reciprocal(logits[rows].softmax(dim=1).amax(dim=1, keepdim=True), out=mass[rows])
    return mass


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their token ids (int64), both [n, k], by falling logit and rising id.

    If several tokens have the same logit as the k-th, a CPU returns those with the smallest ids. A GPU may return any of them:
    to learn whether there is such a tie, the host would have to wait for the device.
    """
    num_rows, vocab_size = logits.shape
    values = logits.new_empty(num_rows, k)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    for rows in row_chunks(logits):
        chunk = logits[rows]
        window, window_ids = top_window(chunk, min(k + 1, vocab_size))
        is_on_cpu = chunk.device.type == "cpu"
        if k < vocab_size and is_on_cpu and bool((window[:, k - 1] <= window[:, k]).any()):
            window, window_ids = torch.sort(chunk, dim=1, descending=True, stable=True)
        values[rows] = window[:, :k]
        ids[rows] = window_ids[:, :k]
    return values, ids


def top_window(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits of each row and their token ids (int64), both [n, width], by falling logit and rising id.

    If several tokens have the smallest of these logits, any of them may be in the window.

    To find the window, the tokens are divided into groups: token j is in group j % num_groups. Up to num_groups - 1
    last tokens may be in no group. Each other token of the window is in one of the `width` groups with the largest maxima. So
    only the members of these groups, and the tokens in no group, are sorted. With groups of about
    sqrt(vocab_size / width) tokens, there are few maxima to compare and few members to sort.
    """
    num_rows, vocab_size = logits.shape
    group_size = math.isqrt(vocab_size // width)
    num_groups = vocab_size // group_size
    grouped = num_groups * group_size if group_size > 1 else 0
    others = torch.arange(grouped, vocab_size, dtype=torch.int64, device=logits.device)  # the tokens in no group
    ids = others.expand(num_rows, -1)
    values = logits
    if grouped:
        maxima = logits[:, :grouped].view(num_rows, group_size, num_groups).amax(dim=1)
        groups = torch.topk(maxima, width, dim=1, sorted=False).indices
        members = torch.arange(0, grouped, num_groups, dtype=torch.int64, device=logits.device)
        ids = torch.cat([(groups[:, :, None] + members).flatten(1), ids], dim=1)
        values = logits.gather(1, ids)
    order = torch.topk(sort_keys(values, ids), width, dim=1).indices
    return values.gather(1, order), ids.gather(1, order)


def sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys: larger for a larger value, and of equal values larger for a smaller id. A NaN has the largest key."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits = torch.where(values.isnan(), _NAN_BITS, bits)  # the same bits for NaNs of both signs
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # the bits of negative floats fall as the value rises: reverse them
    return (ordered.to(torch.int64) << 32) - ids
