"""A model that the code of transformers computes on Inflight's caches: its logits are those of transformers alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.engine import QuantizationConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.ranks import RankLayout
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError
from inflight.models.transformers_fallback.model import TransformersForCausalLM
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.model_zoo import FALLBACK_CONFIGS, VOCAB_SIZE
from tests.unit.models.transformers_fallback.fallback_models import Session, assert_agree, draw_sequences, load, write


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",  # windows, caps of scores and logits
        "gpt2",  # learned positions, and no linear layers
        "qwen3_moe",  # weights of experts, which are stacked
        "gpt_oss",  # sinks, and experts with biases
        "falcon_mamba",  # states, and no attention
        "olmo_hybrid",  # states in one layer, attention in the other
    ],
)
def test_logits_of_prompts_in_parts_beside_single_tokens(tmp_path: Path, family: str) -> None:
    folder, truth = write(tmp_path, family)
    sequences = draw_sequences()
    assert_agree(Session(load(folder)).run(sequences), sequences, truth)


def test_attention_beside_a_state_in_one_layer(tmp_path: Path) -> None:
    """Layers that are left out of a step write nothing to their caches. This is how the memory of a step is measured."""
    config = deepcopy(FALLBACK_CONFIGS["falcon_h1"][0])
    config.num_hidden_layers = 1
    folder, truth = write(tmp_path, config)
    sequences, model = draw_sequences(), load(folder)
    assert_agree(Session(model).run(sequences), sequences, truth)
    mixer, attention = "model.layers.0.mamba", "model.layers.0.self_attn"
    assert list(model.cached_layers()) == [mixer, attention]
    hidden: list[Tensor] = []
    for chosen in ([0], [1], [0, 1], None):
        session = Session(model)
        before = [arena.clone() for arena in session.arenas]
        found = session.step(sequences, (6, 5, 0), layers=chosen)
        assert isinstance(found, Tensor)
        hidden.append(found)
        are_written = [not arena.equal(old) for arena, old in zip(session.arenas, before, strict=True)]
        assert are_written == [chosen is None or number in chosen for number in (0, 1)]
    assert all(each.shape == (11, 64) for each in hidden) and hidden[2].equal(hidden[3])
    assert not any(each.allclose(hidden[3]) for each in hidden[:2])


@pytest.fixture
def host_dtype() -> Iterator[torch.dtype]:
    torch.set_default_dtype(torch.float64)
    yield torch.float64
    torch.set_default_dtype(torch.float32)


def test_rows_and_logits(tmp_path: Path, host_dtype: torch.dtype) -> None:
    """The default dtype is that of the host program: here not the usual one."""
    torch.set_default_dtype(torch.float32)
    folder, truth = write(tmp_path, "gemma2")
    sequences = draw_sequences()
    with torch.no_grad():
        wanted = truth(sequences[0][None]).logits[0]
    torch.set_default_dtype(host_dtype)
    model = load(folder)
    rows = torch.tensor([4, 20, 2])
    hidden = Session(model).step(sequences, (21, 0, 0), rows)
    assert isinstance(hidden, Tensor) and hidden.shape == (3, 64) and hidden.dtype == torch.float32
    with torch.no_grad():
        logits = model.compute_logits(hidden)
        torch.testing.assert_close(logits, wanted[rows], rtol=1e-4, atol=1e-4)
        out = torch.empty(3, VOCAB_SIZE, dtype=torch.float32)
        assert model.compute_logits(hidden, out) is out and out.equal(logits)
        none = model.compute_logits(hidden[:0])
    assert none.shape == (0, VOCAB_SIZE) and none.dtype == torch.float32 and logits.is_contiguous()


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", (1, 1)), ("qwen3_moe", (1, 1))])
def test_stages_one_after_the_other_are_the_whole(tmp_path: Path, family: str, num_layers: tuple[int, ...]) -> None:
    folder, truth = write(tmp_path, family)
    sequences = draw_sequences()
    stages = [load(folder, stage=pipeline_stage(num_layers, number)) for number in range(len(num_layers))]
    names = [f"model.layers.{number}.self_attn" for number in range(sum(num_layers))]
    assert [name for stage in stages for name in stage.cached_layers()] == names
    assert_agree(Session(*stages).run(sequences), sequences, truth)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("gemma2", QuantizationConfig()),
        ("qwen3_moe", QuantizationConfig()),
        ("qwen3_moe", QuantizationConfig(layers="int8", head="int8")),
    ],
)
def test_ranks_together_are_the_whole(tmp_path: Path, family: str, quantization: QuantizationConfig) -> None:
    folder, truth = write(tmp_path, family)
    sequences = draw_sequences()
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=300)

    def load_rank(rank: int) -> TransformersForCausalLM:
        return load(folder, tp=worlds.of(rank).tensor_parallel_group("model"), quantization=quantization)

    with ThreadPoolExecutor(2) as ranks:
        models = list(ranks.map(load_rank, range(2)))
        one, other = ranks.map(lambda model: Session(model).run(sequences), models)
    assert all(first.equal(second) for first, second in zip(one, other, strict=True))
    if quantization.layers is None:
        assert_agree(one, sequences, truth)
        assert [layer.num_heads for layer in models[1].attention.layers.values()] == [2, 2]


def test_two_stages_in_bfloat16(tmp_path: Path) -> None:
    folder, truth = write(tmp_path, "gemma2")
    sequences = draw_sequences()
    stages = [load(folder, dtype="bfloat16", stage=pipeline_stage((1, 1), number)) for number in range(2)]
    with torch.no_grad():
        found, wanted = Session(*stages).run(sequences), truth(sequences[0][None]).logits[0]
    assert found[0].dtype == torch.float32
    assert FLOAT32_TOLERANCE < relative_difference(found[0], wanted) < 0.1


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """Up to eight of them."""
    folder, _ = write(tmp_path, "olmo2")
    weights = load_file(folder / "model.safetensors")
    names = sorted(name for name in weights if ".layers.1." in name)
    for count in (8, 9):
        save_file(
            {name: each for name, each in weights.items() if name not in names[:count]}, folder / "model.safetensors"
        )
        with pytest.raises(CheckpointError, match=r"^the checkpoint lacks ") as refusal:
            load(folder)
        message = str(refusal.value)
        assert sum(name in message for name in names[:count]) == 8
        assert ("and 1 more" in message) == (count == 9)


def test_a_copy_of_a_tied_weight_is_left_unread(tmp_path: Path) -> None:
    folder, truth = write(tmp_path, "gemma2")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    model = load(folder)
    assert model.leaves_unread("lm_head.weight") != model.leaves_unread("model.embed_tokens.weight")
    sequences = draw_sequences()
    assert_agree(Session(model).run(sequences), sequences, truth)


def test_random_weights_do_not_depend_on_stages(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "gemma2")
    (folder / "model.safetensors").unlink()
    sequences = draw_sequences()
    whole = load(folder, load_format="dummy")
    assert not whole.leaves_unread("lm_head.weight")
    stages = [load(folder, load_format="dummy", stage=pipeline_stage((1, 1), number)) for number in range(2)]
    for found, wanted in zip(Session(*stages).run(sequences), Session(whole).run(sequences), strict=True):
        assert wanted.std() > 0.01
        torch.testing.assert_close(found, wanted)


def test_a_stage_that_is_not_the_last_gives_all_tokens_in_both_tensors(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "olmo2")
    session = Session(load(folder, stage=pipeline_stage((1, 1), 0)))
    passed = session.step(draw_sequences(), (5, 0, 0), torch.tensor([0]))
    assert isinstance(passed, IntermediateTensors) and passed.delta.shape == passed.residual.shape == (5, 64)
