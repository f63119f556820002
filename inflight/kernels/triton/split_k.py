"""Split-K for Triton products: several programs share the inner dimension of a tile, and the last one adds up all their sums.

The sums are added in the order of the splits, whichever program is the last. So a result does not depend on timing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from inflight.kernels.triton.layer_ops import gated

MIN_BLOCK_M = 16  # least size for tensor cores


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A tile has `block_n` output features. `num_splits` programs share the input features of a tile. Each program loads
    `block_k` input features at a time."""

    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"{self.block_n}x{self.block_k}, {self.num_splits} splits, {self.num_warps} warps, {self.num_stages} stages"
        )


def is_of_the_tile(error: Exception) -> bool:
    """Whether the tile size caused the error, so that another size may succeed: it needs more of a resource than the GPU has,
    or the compiler failed. False for an error of the device, after which the device cannot run anything."""
    if isinstance(error, (OutOfResources, CompilationError, PTXASError)):
        return True
    return isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)  # a compiler pass failed


class SplitKScratch:
    """Partial sums and arrival counters, for products that run one after another on one stream.

    Counters are zero between two products: the last program of a tile resets the tile's counter.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(1, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, out_features: int, num_rows: int, config: TileConfig) -> None:
        """Makes room for a product of this size. The memory may move, so do not call this after a graph was recorded."""
        num_tiles = triton.cdiv(out_features, config.block_n)
        if config.num_splits == 1:
            return
        num_partials = num_tiles * config.num_splits * config.block_n * block_m(num_rows)
        if self.partials.numel() < num_partials:
            self.partials = self.partials.new_empty(num_partials)
        if self.counters.numel() < num_tiles:
            self.counters = self.counters.new_zeros(num_tiles)


def block_m(num_rows: int) -> int:
    """The number of rows of a tile, large enough for all rows of the product."""
    return max(MIN_BLOCK_M, 1 << (num_rows - 1).bit_length())


@triton.jit
def tile_features(out_features, GATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight for this program's tile, [BLOCK_N]. If there is a GATE, gates and the features that they multiply
    alternate.

    Beyond the last feature, the index of the last feature is repeated; the results of these copies are not stored.
    """
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATE != 0:
        features = tl.minimum(index // 2, out_features // 2 - 1) + index % 2 * (out_features // 2)
    else:
        features = tl.minimum(index, out_features - 1)
    return features


@triton.jit
def finish_tile(
    total,
    scales,
    bias,
    out,
    partials,
    counters,
    num_rows,
    out_features,
    out_stride,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the sums of the splits. `total`, float32 [BLOCK_N, BLOCK_M], is this program's sum. Then apply scales, bias and
    gate, and store the result once."""
    tile, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, BLOCK_M)
    is_row = (rows < num_rows)[None, :]
    # row by row, so that padding rows cause no memory traffic
    inner = rows[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_last = True
    if num_splits > 1:
        shared = partials + (tile * num_splits).to(tl.int64) * (BLOCK_N * BLOCK_M) + inner
        tl.store(shared + split * (BLOCK_N * BLOCK_M), total, mask=is_row)
        tl.debug_barrier()  # all threads have stored before the counter is raised
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == num_splits - 1
        if is_last:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for part in range(num_splits):
                total += tl.load(shared + part * (BLOCK_N * BLOCK_M), mask=is_row, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    features = tile_features(out_features, GATE, BLOCK_N)
    if HAS_SCALES:
        total *= tl.load(scales + features)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + features).to(tl.float32)[:, None]
    NUM_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATE != 0 else BLOCK_N
    result = total
    if GATE != 0:
        gate, up = tl.split(tl.permute(tl.reshape(total, [NUM_COLUMNS, 2, BLOCK_M]), [0, 2, 1]))
        result = gated(gate, up, GATE)
    columns = tile * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    to = out + rows.to(tl.int64)[None, :] * out_stride + columns[:, None]
    is_there = (columns < (out_features // 2 if GATE != 0 else out_features))[:, None] & is_row & is_last
    tl.store(to, result.to(out.dtype.element_ty), mask=is_there)
