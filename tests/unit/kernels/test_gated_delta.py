"""The gated delta rule, in torch and in C++, against a recurrence in float64 that goes token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.interface.request import Int32Array
from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.cpu.library import AttentionStep, open_kernels
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights, delta_rule, gated_delta
from tests.instruction_sets import INSTRUCTION_SETS_HERE

SHAPES = [
    GatedDeltaShape(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=32, kernel_size=4),
    GatedDeltaShape(num_key_heads=3, num_value_heads=3, key_dim=48, value_dim=64, kernel_size=2),
    GatedDeltaShape(num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=96, kernel_size=8),
]
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 16, 40, 8
TOLERANCE = {torch.float32: 4e-5, torch.bfloat16: 2**-7}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(shape: GatedDeltaShape, seed: int = 0) -> GatedDeltaWeights:
    num_heads = shape.num_value_heads
    return GatedDeltaWeights(
        conv=drawn(seed, shape.kernel_size, shape.num_channels),
        rates=drawn(seed + 1, num_heads).exp(),
        step_bias=drawn(seed + 2, num_heads),
        norm=1 + 0.1 * drawn(seed + 3, shape.value_dim),
        eps=1e-6,
    )


def truth(rows: Tensor, shape: GatedDeltaShape, weights: GatedDeltaWeights) -> Tensor:
    """The formulas of kernels/gated_delta.py, for a whole sequence."""
    channels, gates, betas, steps = torch.split(rows.double(), [*shape.row_parts], dim=-1)
    before = channels.new_zeros(shape.kernel_size - 1, shape.num_channels)
    seen, taps = torch.cat([before, channels]), weights.conv.double()
    mixed = F.silu(sum(seen[k : k + len(rows)] * taps[k] for k in range(shape.kernel_size)))
    num_keys, per_key = shape.num_key_heads * shape.key_dim, shape.num_value_heads // shape.num_key_heads
    state = torch.zeros(shape.state_shapes[0], dtype=torch.float64)
    out = []
    for token, x in enumerate(mixed):
        query, key = x[:num_keys].view(-1, shape.key_dim), x[num_keys : 2 * num_keys].view(-1, shape.key_dim)
        query, key = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (query, key))
        query, key = (y.repeat_interleave(per_key, dim=0) for y in (query / math.sqrt(shape.key_dim), key))
        value = x[2 * num_keys :].view(-1, shape.value_dim)
        decay = torch.exp(-weights.rates.double() * F.softplus(steps[token] + weights.step_bias.double()))
        state = state * decay[:, None, None]
        known = torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, betas[token].sigmoid()[:, None] * (value - known))
        head = torch.einsum("hk,hkv->hv", query, state)
        head = head / (head.square().mean(-1, keepdim=True) + weights.eps).sqrt() * weights.norm.double()
        out.append(head * F.silu(gates[token]).view(head.shape))
    return torch.stack(out)


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().mean(-1, keepdim=True) + wanted.abs()
    difference = ((ours.double().view(wanted.shape) - wanted).abs() / scale).max()
    assert difference < TOLERANCE[ours.dtype], difference


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_in_pieces(shape: GatedDeltaShape) -> None:
    rows, weights = drawn(5, 150, sum(shape.row_parts)), weights_of(shape)
    state, inputs = (torch.zeros(each) for each in shape.state_shapes)
    pieces = []
    for piece in torch.split(rows, [1, 2, 1, 100, 46]):
        out, state, inputs = gated_delta(piece, state, inputs, shape, weights)
        pieces.append(out)
    assert_close(torch.cat(pieces), truth(rows, shape, weights))


def test_a_strong_decay_does_not_overflow() -> None:
    num_tokens, heads = 70, (2, 16)
    keys = F.normalize(drawn(1, num_tokens, *heads), dim=-1)
    decays = torch.full((num_tokens, 2), -50.0)
    out, state = delta_rule(keys, keys, keys, decays, torch.ones(num_tokens, 2), torch.ones(2, 16, 16))
    assert out.isfinite().all() and state.isfinite().all()
    torch.testing.assert_close(out, keys, rtol=1e-5, atol=1e-5)  # the past is forgotten: q^T k v


class Sequences:
    """A few sequences of one layer, whose blocks are scattered over an arena that is full of NaN."""

    def __init__(self, name: str, shape: GatedDeltaShape, dtype: torch.dtype, num_sequences: int) -> None:
        self.shape, self.dtype, self.weights = shape, dtype, weights_of(shape)
        self.kernel = CpuGatedDelta(open_kernels(name), shape, self.weights)
        state, inputs = (math.prod(each) for each in shape.state_shapes)
        self.offset, size = 4 * state, 4 * state + inputs * dtype.itemsize
        self.arena = torch.full((NUM_BLOCKS, size + 64), 255, dtype=torch.uint8)
        self.free = list(np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS)))
        self.tables = np.zeros((num_sequences, WIDTH), dtype=np.int32)
        self.rows = [drawn(9 + i, BLOCK_SIZE * WIDTH, sum(shape.row_parts)).to(dtype) for i in range(num_sequences)]
        self.lengths = np.zeros(num_sequences, dtype=np.int32)
        self.results: list[list[Tensor]] = [[] for _ in range(num_sequences)]

    def step(self, counts: Int32Array, snapshots: list[int]) -> None:
        """`counts`: the tokens of each sequence. `snapshots`: which blocks keep a state, besides the last one of a step."""
        ends = self.lengths + counts
        for sequence, (start, end) in enumerate(zip(self.lengths, ends, strict=True)):
            for index in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                is_last = index == (end - 1) // BLOCK_SIZE
                if (is_last or index in snapshots) and not self.tables[sequence, index]:
                    self.tables[sequence, index] = self.free.pop()
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        arrays = starts, ends.astype(np.int32), self.lengths.copy(), self.tables.copy()
        step = AttentionStep(len(counts), BLOCK_SIZE, 2, WIDTH, *(array.ctypes.data for array in arrays))
        spans = list(zip(self.rows, self.lengths, ends, strict=True))
        rows = torch.cat([rows[start:end] for rows, start, end in spans])
        before = rows.clone()
        out = self.kernel(rows, self.arena[:, :-64], self.offset, step)
        assert torch.equal(rows, before)
        for results, piece in zip(self.results, torch.split(out, counts.tolist()), strict=True):
            results.append(piece)
        self.lengths = ends.astype(np.int32)

    def check(self) -> None:
        for rows, length, results in zip(self.rows, self.lengths, self.results, strict=True):
            assert_close(torch.cat(results), truth(rows[:length], self.shape, self.weights))
        assert (self.arena[:, -64:] == 255).all(), "written behind a block"
        assert (self.arena[0] == 255).all(), "written to the dummy block"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_the_kernel_in_steps(name: str, shape: GatedDeltaShape, dtype: torch.dtype) -> None:
    sequences = Sequences(name, shape, dtype, 3)
    for counts in ((5, 1, 40), (1, 1, 1), (10, 33, 0), (1, 20, 1), (1, 1, 50), (70, 3, 2)):
        sequences.step(np.array(counts, dtype=np.int32), snapshots=[0, 2])
    sequences.check()


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_a_snapshot_begins_another_sequence(name: str) -> None:
    """Its states are those that a step would have left that ended there, bit for bit."""
    shape = SHAPES[0]
    sequences = Sequences(name, shape, torch.float32, 2)
    sequences.rows[1][: 2 * BLOCK_SIZE] = sequences.rows[0][: 2 * BLOCK_SIZE]
    sequences.step(np.array([3 * BLOCK_SIZE + 5, 0], dtype=np.int32), snapshots=[1])
    sequences.step(np.array([1, 0], dtype=np.int32), snapshots=[])
    sequences.tables[1, 1], sequences.lengths[1] = sequences.tables[0, 1], 2 * BLOCK_SIZE
    kept = sequences.arena[sequences.tables[0, 1]].clone()
    sequences.step(np.array([0, 7], dtype=np.int32), snapshots=[])
    assert torch.equal(sequences.arena[sequences.tables[0, 1]], kept), "a snapshot that others may share was changed"
    (found,) = [piece for piece in sequences.results[1] if len(piece)]
    wanted = truth(sequences.rows[1][: 2 * BLOCK_SIZE + 7], shape, sequences.weights)[-7:]
    assert_close(found, wanted)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_results_do_not_depend_on_chunks_or_company(name: str) -> None:
    alone, together = (Sequences(name, SHAPES[0], torch.bfloat16, 2) for _ in range(2))
    alone.step(np.array([60, 0], dtype=np.int32), snapshots=[])
    for counts in ((1, 30), (17, 1), (42, 1)):
        together.step(np.array(counts, dtype=np.int32), snapshots=[0])
    assert torch.equal(torch.cat(alone.results[0]), torch.cat(together.results[0]))
