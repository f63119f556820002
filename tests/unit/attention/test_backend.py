"""Where a step's rows are cut for recurrent layers (`StateMetadata.pieces`), and where the caches of layers are in a block."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inflight.attention.backend import Rotation
from inflight.attention.metadata import AttentionInputs, StateMetadata, StatePiece, StatePlace
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.layer_ops import TorchLayerOps

BLOCK_SIZE = 4


def pieces(start: int, count: int, *, num_states: int) -> list[StatePiece]:
    """Of one row with `count` tokens behind `start` others. Its blocks are 7 and 8, and the dummy block."""
    inputs = AttentionInputs(
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([start + count], dtype=np.int32),
        num_computed_tokens=np.array([start], dtype=np.int32),
        block_table=np.array([[7, 8, 0]], dtype=np.int32),
    )
    metadata = StateMetadata(num_tokens=count, inputs=inputs, block_size=BLOCK_SIZE, num_states=num_states)
    return list(metadata.pieces())


@pytest.mark.parametrize("count", [2, 3])
def test_every_token_keeps_its_state_if_the_block_has_room_for_all(count: int) -> None:
    """They may be drafts: only the next step knows after which of them the sequence goes on."""
    places = [StatePlace(7, 1), StatePlace(7, 2), StatePlace(7, 0), StatePlace(8, 1)]  # after 2, 3, 4 and 5 tokens
    wanted = [StatePiece(slice(i, i + 1), places[i], places[i + 1]) for i in range(count)]
    assert pieces(2, count, num_states=3) == wanted


def test_a_longer_row_keeps_the_states_at_the_ends_of_blocks_and_its_last_one() -> None:
    first = StatePiece(slice(0, 2), StatePlace(7, 1), StatePlace(7, 0))
    assert pieces(2, 4, num_states=3) == [first, StatePiece(slice(2, 4), StatePlace(7, 0), StatePlace(8, 2))]


def test_the_first_tokens_have_no_state_before_them() -> None:
    assert pieces(0, 3, num_states=1) == [StatePiece(slice(0, 3), None, StatePlace(7, 0))]


def test_each_layer_of_a_group_has_a_part_of_a_block() -> None:
    spec, arena = KVCacheSpec.of_state(BLOCK_SIZE, 64), torch.arange(2 * 192, dtype=torch.int64).view(2, 192) % 251
    arena = arena.to(torch.uint8)
    parts = [TorchSdpaBackend().layer_cache(arena, spec, layer) for layer in range(192 // spec.block_bytes)]
    assert torch.equal(torch.cat(parts, dim=1), arena) and len(parts) > 1


def test_each_layer_with_keys_and_values_has_a_part_of_a_block_too() -> None:
    spec = KVCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4)
    arena, backend = torch.zeros(3, 2 * spec.block_bytes, dtype=torch.uint8), TorchSdpaBackend()
    views = [backend.layer_cache(arena, spec, layer) for layer in range(2)]
    assert [view.shape for view in views] == [(3, 2, 2, BLOCK_SIZE, 8)] * 2
    views[1].fill_(1.0)
    assert not views[0].any() and arena[:, spec.block_bytes :].view(torch.float32).eq(1).all()


def test_the_metadata_of_a_group_is_that_of_its_kind_and_keeps_none_of_the_inputs() -> None:
    inputs = AttentionInputs(
        query_start_loc=np.array([0, 2, 5], dtype=np.int32),
        seq_lens=np.array([2, 9], dtype=np.int32),
        num_computed_tokens=np.array([0, 6], dtype=np.int32),
        block_table=np.array([[7, 0, 0], [3, 4, 5]], dtype=np.int32),
    )
    backend, state = TorchSdpaBackend(), KVCacheSpec.of_state(BLOCK_SIZE, 64)
    metadata = backend.metadata_builder(state)(inputs)
    assert isinstance(metadata, StateMetadata)
    assert (metadata.num_tokens, metadata.block_size, metadata.num_states) == (5, BLOCK_SIZE, state.num_states)
    before = list(metadata.pieces())
    keys = KVCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4)
    assert not isinstance(backend.metadata_builder(keys)(inputs), StateMetadata)
    inputs.block_table.fill(1)
    assert list(metadata.pieces()) == before
    assert backend.scratch_bytes(keys, per_head=2, num_threads=3) == 0


def test_a_rotation_without_angles_leaves_heads_as_they_are_but_not_their_norm() -> None:
    ops = TorchLayerOps()
    heads = torch.randn(3, 2, 4)
    nothing = Rotation(torch.ones(3, 4), torch.zeros(3, 4), ops, changes_nothing=True)
    assert nothing.apply(heads, None) is heads
    norm = SimpleNamespace(weight=torch.full((2, 4), 2.0), eps=1e-6)
    truth = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 2
    assert torch.allclose(nothing.apply(heads, norm), truth, atol=1e-5)


def test_what_a_step_keeps_of_its_rotation() -> None:
    cos, sin, scale = torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 1)
    ops = TorchLayerOps()
    assert [each.data_ptr() for each in Rotation(cos, sin, ops).tensors] == [cos.data_ptr(), sin.data_ptr()]
    kept = Rotation(cos, sin, ops, scale).tensors
    assert [each.data_ptr() for each in kept] == [cos.data_ptr(), sin.data_ptr(), scale.data_ptr()]


def test_rows_of_two_sequences_and_blocks_that_keep_no_state() -> None:
    """Of the second row only the last of three full blocks keeps its state."""
    inputs = AttentionInputs(
        query_start_loc=np.array([0, 2, 15], dtype=np.int32),
        seq_lens=np.array([6, 13], dtype=np.int32),
        num_computed_tokens=np.array([4, 0], dtype=np.int32),
        block_table=np.array([[7, 8, 0, 0], [0, 0, 5, 6]], dtype=np.int32),
    )
    metadata = StateMetadata(num_tokens=15, inputs=inputs, block_size=BLOCK_SIZE, num_states=1)
    assert list(metadata.pieces()) == [
        StatePiece(slice(0, 2), StatePlace(7, 0), StatePlace(8, 0)),
        StatePiece(slice(2, 14), None, StatePlace(5, 0)),
        StatePiece(slice(14, 15), StatePlace(5, 0), StatePlace(6, 0)),
    ]
