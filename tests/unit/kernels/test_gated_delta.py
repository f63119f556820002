"""The gated delta rule, in torch and in C++, against a recurrence in float64 that goes token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights, delta_rule, gated_delta
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.unit.kernels.recurrent_case import BLOCK_SIZE, Sequences, assert_close, check_drafts, drawn

SHAPES = [
    GatedDeltaShape(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=32, kernel_size=4),
    GatedDeltaShape(num_key_heads=3, num_value_heads=3, key_dim=48, value_dim=64, kernel_size=2),
    GatedDeltaShape(num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=96, kernel_size=8),
]


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


def sequences_of(
    name: str, shape: GatedDeltaShape, dtype: torch.dtype, num_sequences: int, num_states: int = 1
) -> Sequences:
    weights = weights_of(shape)
    state, inputs = (math.prod(each) for each in shape.state_shapes)
    return Sequences(
        CpuGatedDelta(open_kernels(name), shape, weights),
        lambda rows: truth(rows, shape, weights),
        width=sum(shape.row_parts),
        offsets=[0, 4 * state, 4 * state + inputs * dtype.itemsize],
        dtype=dtype,
        num_sequences=num_sequences,
        num_states=num_states,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_the_kernel_in_steps(name: str, shape: GatedDeltaShape, dtype: torch.dtype) -> None:
    sequences = sequences_of(name, shape, dtype, 3)
    for counts in ((5, 1, 40), (1, 1, 1), (10, 33, 0), (1, 20, 1), (1, 1, 50), (70, 3, 2)):
        sequences.step(np.array(counts, dtype=np.int32), snapshots=[0, 2])
    sequences.check()


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_a_snapshot_begins_another_sequence(name: str) -> None:
    """Its states are those that a step would have left that ended there, bit for bit."""
    shape = SHAPES[0]
    sequences = sequences_of(name, shape, torch.float32, 2)
    sequences.rows[1][: 2 * BLOCK_SIZE] = sequences.rows[0][: 2 * BLOCK_SIZE]
    sequences.step(np.array([3 * BLOCK_SIZE + 5, 0], dtype=np.int32), snapshots=[1])
    sequences.step(np.array([1, 0], dtype=np.int32), snapshots=[])
    sequences.tables[1, 1], sequences.lengths[1] = sequences.tables[0, 1], 2 * BLOCK_SIZE
    kept = sequences.arena[sequences.tables[0, 1]].clone()
    sequences.step(np.array([0, 7], dtype=np.int32), snapshots=[])
    assert torch.equal(sequences.arena[sequences.tables[0, 1]], kept), "a snapshot that others may share was changed"
    (found,) = [piece for piece in sequences.results[1] if len(piece)]
    wanted = sequences.truth(sequences.rows[1][: 2 * BLOCK_SIZE + 7])[-7:]
    assert_close(found, wanted)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_results_do_not_depend_on_chunks_or_company(name: str) -> None:
    alone, together = (sequences_of(name, SHAPES[0], torch.bfloat16, 2) for _ in range(2))
    alone.step(np.array([60, 0], dtype=np.int32), snapshots=[])
    for counts in ((1, 30), (17, 1), (42, 1)):
        together.step(np.array(counts, dtype=np.int32), snapshots=[0])
    assert torch.equal(torch.cat(alone.results[0]), torch.cat(together.results[0]))


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_rejected_drafts_leave_nothing_in_the_state(name: str) -> None:
    check_drafts(sequences_of(name, SHAPES[0], torch.float32, 3, num_states=4))
