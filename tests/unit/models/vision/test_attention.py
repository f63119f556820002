"""The attention of towers: both ways compute what plain torch computes in float64, however the patches are divided."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import load_kernels
from inflight.models.vision.attention import Heads, attend, attend_with_kernel

NUM_HEADS = 3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
# frames of one size; windows, of which those at the edges are smaller; one segment, and one of a single patch
SEGMENTS = [[20, 20, 20], [16, 7, 16, 7, 4, 1], [70], [1], [33, 1]]


@pytest.fixture(scope="module")
def ops() -> CpuLayerOps:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C++ kernels on this machine")
    return CpuLayerOps(kernels)


def draw(segments: list[int], head_dim: int, dtype: torch.dtype) -> Heads:
    """Neighbours in one tensor, as a projection to queries, keys and values returns them."""
    generator = torch.Generator().manual_seed(len(segments) + head_dim)
    found = torch.randn(sum(segments), 3 * NUM_HEADS, head_dim, generator=generator).to(dtype)
    return Heads(*found.split(NUM_HEADS, dim=1))


def truth(heads: Heads, segments: list[int], scale: float) -> Tensor:
    parts = zip(*(each.double().split(segments) for each in (heads.query, heads.key, heads.value)), strict=True)
    found = []
    for query, key, value in parts:
        weights = torch.einsum("qhd,khd->hqk", query, key).mul(scale).softmax(dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 24, 64])  # the kernel needs a multiple of 16
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_patches_see_those_of_their_segment(
    segments: list[int], head_dim: int, dtype: torch.dtype, ops: CpuLayerOps
) -> None:
    heads, count = draw(segments, head_dim, dtype), sum(segments)
    wanted = truth(heads, segments, head_dim**-0.5)
    whole = attend_with_kernel(ops, draw(segments, head_dim, dtype), segments, 0, count)
    assert (whole - wanted).abs().max() < TOLERANCE[dtype]
    assert (attend(ops, heads, segments, 0, count) - wanted).abs().max() < TOLERANCE[dtype]
    for size in (7, 16):  # slices, which end inside segments
        heads = draw(segments, head_dim, dtype)
        bounds = [(first, min(first + size, count)) for first in range(0, count, size)]
        slices = [attend_with_kernel(ops, heads, segments, *each) for each in bounds]
        assert torch.equal(torch.cat(slices), whole), "bit for bit, because the kernel's sums have a fixed order"


def test_the_scale_of_the_scores(ops: CpuLayerOps) -> None:
    heads = draw([30], 16, torch.float32)
    found = attend_with_kernel(ops, heads, [30], 0, 30, scale=1.0)
    assert (found - truth(heads, [30], 1.0)).abs().max() < 2e-5


def test_the_kernel_refuses_heads_that_are_not_side_by_side(ops: CpuLayerOps) -> None:
    heads = draw([30], 16, torch.float32)
    heads.key = heads.key.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(AssertionError, match="side by side"):
        attend_with_kernel(ops, heads, [30], 0, 30)
    with pytest.raises(AssertionError, match="segments"):
        attend_with_kernel(ops, draw([30], 16, torch.float32), [31], 0, 30)
