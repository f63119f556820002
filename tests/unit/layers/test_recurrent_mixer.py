"""Recurrent layers compute what those of transformers compute, also in pieces, with states in scattered blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.attention.backend import LayerStep
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionInputs, StateMetadata, StatePlace
from inflight.config.mixers import GatedDeltaSpec
from inflight.config.parse_architecture import parse_architecture
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.library import load_kernels
from inflight.layers.gated_delta import GatedDeltaMixer
from inflight.layers.mixer import MixerPlace
from inflight.layers.recurrent_mixer import RecurrentMixer
from inflight.layers.recurrent_state import RecurrentState
from tests.support.model_zoo import FAMILY_CONFIGS
from tests.unit.layers.contexts import layer_context
from tests.unit.layers.zoo_layers import HIDDEN_SIZE, assert_equal, both_models, drawn

BLOCK_SIZE, NUM_BLOCKS = 16, 12
# the tokens of two sequences in each step: prompts, single tokens, and pieces that end within a block and at its end
STEPS = [(21, 5), (1, 11), (1, 1), (9, 0), (0, 16), (13, 1)]
TABLES = np.array([[7, 3, 11], [2, 9, 5]], dtype=np.int32)
FAMILIES = [
    ("qwen3_5", 0, "linear_attn"),
    ("qwen3_5", 1, "linear_attn"),
    ("qwen3_5", 2, "linear_attn"),  # sizes that are not for the kernel
    ("qwen3_next", 0, "linear_attn"),  # projections that are grouped by key heads
    ("lfm2", 0, "conv"),
    ("lfm2", 1, "conv"),  # biases
]


def mixers(ours: Any, theirs: Any, name: str) -> list[tuple[RecurrentMixer, Any]]:
    pairs = zip(ours.layers, theirs.layers, strict=True)
    found = [(layer.self_attn, getattr(other, name)) for layer, other in pairs if hasattr(other, name)]
    assert found and all(isinstance(mixer, RecurrentMixer) for mixer, _ in found)
    return found


def run(mixer: RecurrentMixer, rows: list[Tensor], *, in_torch: bool) -> list[Tensor]:
    """The results for two sequences, computed in `STEPS`."""
    spec = mixer.state.kv_cache_spec(BLOCK_SIZE, torch.float32)
    arena = torch.full((NUM_BLOCKS, spec.state_bytes), 255, dtype=torch.uint8)  # NaN
    mixer.state.bind(arena, 1)
    kernels = load_kernels()
    results: list[list[Tensor]] = [[], []]
    done = np.zeros(2, dtype=np.int32)
    for counts in STEPS:
        chosen = [sequence for sequence in range(2) if counts[sequence]]
        sizes = np.array([counts[sequence] for sequence in chosen], dtype=np.int32)
        before = done[chosen]
        inputs = AttentionInputs(
            query_start_loc=np.concatenate(([0], sizes.cumsum())).astype(np.int32),
            seq_lens=before + sizes,
            num_computed_tokens=before,
            block_table=TABLES[chosen],
        )
        metadata: Any = StateMetadata(num_tokens=int(sizes.sum()), inputs=inputs, num_states=1, block_size=BLOCK_SIZE)
        if not in_torch:
            assert kernels is not None
            metadata = CpuPagedBackend(kernels).metadata_builder(spec)(inputs)
        spans = zip(chosen, before, before + sizes, strict=True)
        hidden = torch.cat([rows[sequence][start:end] for sequence, start, end in spans])
        unread: Any = None  # the metadata of another group
        found = mixer(hidden, LayerStep((), (unread, metadata)), None)
        for sequence, piece in zip(chosen, torch.split(found, sizes.tolist()), strict=True):
            results[sequence].append(piece)
        done[chosen] += sizes
    unused = [block for block in range(NUM_BLOCKS) if block not in TABLES]
    assert (arena[unused] == 255).all(), "written to the block of another sequence"
    return [torch.cat(pieces) for pieces in results]


@pytest.mark.parametrize(("family", "index", "name"), FAMILIES)
@torch.inference_mode()
def test_the_layer_is_that_of_transformers(family: str, index: int, name: str, tmp_path: Path) -> None:
    ours, theirs = both_models(family, index, tmp_path / "model")
    lengths = np.array(STEPS).sum(axis=0)
    mixer, other = mixers(ours, theirs, name)[-1]
    size = other.in_proj.in_features if name == "conv" else HIDDEN_SIZE
    rows = [drawn(int(length), size, seed=sequence) for sequence, length in enumerate(lengths)]
    truths = [other(sequence[None])[0] for sequence in rows]
    for in_torch in (True, False) if mixer.kernel is not None else (True,):
        for found, truth in zip(run(mixer, rows, in_torch=in_torch), truths, strict=True):
            assert_equal(found, truth)


@torch.inference_mode()
def test_rows_are_selected_after_the_recurrence(tmp_path: Path) -> None:
    ours, theirs = both_models("lfm2", 0, tmp_path / "model")
    mixer, other = mixers(ours, theirs, "conv")[0]
    hidden, rows = drawn(9, HIDDEN_SIZE), torch.tensor([2, 8])
    mixer.state.bind(torch.zeros(2, mixer.state.offsets[-1], dtype=torch.uint8), 0)
    inputs = AttentionInputs(
        query_start_loc=np.array([0, 9], dtype=np.int32),
        seq_lens=np.array([9], dtype=np.int32),
        num_computed_tokens=np.zeros(1, dtype=np.int32),
        block_table=np.ones((1, 1), dtype=np.int32),
    )
    metadata = StateMetadata(num_tokens=9, inputs=inputs, num_states=1, block_size=BLOCK_SIZE)
    assert_equal(mixer(hidden, LayerStep((), (metadata,)), rows), other(hidden[None])[0][rows])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_keeps_the_matrices_of_its_heads_in_float32(num_ranks: int) -> None:
    architecture = parse_architecture(FAMILY_CONFIGS["qwen3_5"][0].to_dict())
    spec = architecture.layers[0].recurrence
    assert isinstance(spec, GatedDeltaSpec)
    context = layer_context(torch.bfloat16, TensorParallelGroup(num_ranks, num_ranks - 1))
    place = MixerPlace(architecture=architecture, layer=0, rotation_index=0, context=context)
    mixer = GatedDeltaMixer(spec, place)
    num_heads, num_key_heads = 4 // num_ranks, 2 // num_ranks
    assert (mixer.shape.num_value_heads, mixer.shape.num_key_heads) == (num_heads, num_key_heads)
    num_channels = 2 * num_key_heads * 16 + num_heads * 32
    found = mixer.state.kv_cache_spec(BLOCK_SIZE, torch.bfloat16)
    assert found.is_state
    assert found.state_bytes == num_heads * 16 * 32 * 4 + (spec.kernel_size - 1) * num_channels * 2


def test_only_the_norm_is_a_scale_in_random_weights() -> None:
    architecture = parse_architecture(FAMILY_CONFIGS["qwen3_5"][0].to_dict())
    spec = architecture.layers[0].recurrence
    assert isinstance(spec, GatedDeltaSpec)
    context = layer_context(torch.float32)
    mixer = GatedDeltaMixer(spec, MixerPlace(architecture=architecture, layer=0, rotation_index=0, context=context))
    scales = [name for name, slot in mixer.weight_slots("linear_attn") if slot.is_scale]
    assert scales == ["linear_attn.norm.weight"]


def test_the_tensors_of_a_state_lie_apart_and_aligned() -> None:
    backend: Any = None
    state = RecurrentState("layer", [(3, 5), (7,), (2, 2)], [torch.float32, torch.bfloat16, torch.float32], backend)
    assert state.offsets == [0, 64, 128, 192]
    assert state.kv_cache_spec(16, torch.bfloat16).state_bytes == 192
    assert state.kv_cache_spec(16, torch.bfloat16, 2).block_bytes == 384
    arena = torch.zeros(3, 384, dtype=torch.uint8)
    state.bind(arena, 4)
    assert state.group_index == 4
    places = [StatePlace(block, number) for block in range(3) for number in range(2)]
    for first, place in enumerate(places):
        for number, tensor in enumerate(state.tensors(place)):
            tensor.fill_(10 * first + number)
    for first, place in enumerate(places):
        assert [tuple(tensor.shape) for tensor in state.tensors(place)] == [(3, 5), (7,), (2, 2)]
        assert [tensor.unique().tolist() for tensor in state.tensors(place)] == [[10 * first + i] for i in range(3)]
    large = RecurrentState("layer", [(17,), (1,)], [torch.float32, torch.float32], backend)
    assert large.offsets == [0, 128, 192]
