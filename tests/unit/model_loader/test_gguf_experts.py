"""GGUF files of mixtures of experts against the folders with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.ranks import RankLayout
from inflight.config.unknown_family import describe_model
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError, UnsupportedModelError
from inflight.model_loader.stacked_experts import StackedExperts
from tests.support.full_context_attention import run_prompt
from tests.support.gguf_experts import CONFIGS, write_mixture
from tests.support.gguf_files import Number, floats
from tests.unit.model_loader.test_gguf_source import PROMPT, load, source_of


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_a_file_is_the_model_of_its_weights(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, file = write_mixture(tmp_path, architecture)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert torch.equal(run_prompt(load(file), PROMPT), run_prompt(load(plain), PROMPT))


@pytest.mark.parametrize("form", ["merged", "apart"])
def test_other_forms_of_experts(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, file = write_mixture(tmp_path, "llama", merged=form == "merged", apart=form == "apart")
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert torch.equal(run_prompt(load(file), PROMPT), run_prompt(load(plain), PROMPT))


def test_ranks_have_parts_of_each_expert(tmp_path: Path) -> None:
    plain, file = write_mixture(tmp_path, "qwen2moe")
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)
    for rank in range(2):
        group = worlds.of(rank).tensor_parallel_group("model")
        parameters = dict(load(plain, group).named_parameters())
        found = dict(load(file, group).named_parameters())
        assert found.keys() == parameters.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, parameters[name]), (rank, name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"expert_count": Number("I", 6)},
            r"\.expert_count=6 contradicts blk\.0\.ffn_down_exps\.weight, which has 5 experts",
        ),
        (
            {"expert_count": Number("I", 4)},
            r"\.expert_count=4 contradicts blk\.0\.ffn_down_exps\.weight, which has 5 experts",
        ),
        ({"expert_used_count": Number("I", 6)}, "num_experts_per_tok=6 is more than the number of experts, 5"),
        ({"expert_gating_func": Number("I", 2)}, r"qwen3moe\.expert_gating_func=2 is not supported"),
        ({"expert_weights_scale": Number("f", 2.5)}, r"qwen3moe\.expert_weights_scale=2\.5 is not supported"),
        ({"expert_group_count": Number("I", 4)}, r"qwen3moe\.expert_group_count=4 is not supported"),
        (
            {"leading_dense_block_count": Number("I", 1)},
            r"\.leading_dense_block_count=1 contradicts blk\.0\.ffn_down_exps",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    _, file = write_mixture(
        tmp_path, "qwen3moe", {}, metadata={f"qwen3moe.{name}": value for name, value in change.items()}
    )
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load(file)


def test_keys_that_change_nothing(tmp_path: Path) -> None:
    neutral = {
        "expert_gating_func": Number("I", 1),
        "expert_weights_scale": Number("f", 1.0),
        "expert_weights_norm": False,
    }
    _, file = write_mixture(
        tmp_path, "qwen3moe", {}, metadata={f"qwen3moe.{name}": value for name, value in neutral.items()}
    )
    assert read_model_config(file)["norm_topk_prob"] is False
    _, file = write_mixture(tmp_path / "x", "llama", {}, metadata={"llama.expert_weights_norm": False})
    with pytest.raises(UnsupportedModelError, match=r"llama\.expert_weights_norm=False is not supported"):
        read_model_config(file)


def test_layers_that_predict_drafts_are_not_read(tmp_path: Path) -> None:
    """The file counts them among all layers."""
    drafting = {"block_count": Number("I", 4), "nextn_predict_layers": Number("I", 1)}
    _, file = write_mixture(
        tmp_path, "glm4moe", {}, metadata={f"glm4moe.{name}": value for name, value in drafting.items()}
    )
    config = read_model_config(file)
    assert (config["num_hidden_layers"], config["use_qk_norm"], config["scoring_func"]) == (3, True, "sigmoid")
    unread = parse_architecture(config).unread
    assert unread == ("model.layers.3.", "blk.3.")
    load(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_gating_func": Number("I", 1)}, "scoring_func='softmax' is not supported"),
        ({"expert_group_count": Number("I", 3)}, r"n_group=3.*: 8 experts cannot be divided into 3 groups"),
        (
            {"leading_dense_block_count": Number("I", 0)},
            r"leading_dense_block_count=0 contradicts blk\.1\.ffn_down_exps",
        ),
        (
            {"expert_shared_count": Number("I", 1)},
            r"expert_shared_count=1 contradicts blk\.1\.ffn_down_shexp\..* 2 shared",
        ),
    ],
)
def test_routing_that_a_file_describes_wrongly(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    _, file = write_mixture(
        tmp_path, "glm4moe", {}, metadata={f"glm4moe.{name}": value for name, value in change.items()}
    )
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load(file)


def test_an_unknown_function_is_named_by_its_key(tmp_path: Path) -> None:
    _, file = write_mixture(tmp_path, "glm4moe", {}, metadata={"glm4moe.expert_gating_func": Number("I", 7)})
    with pytest.raises(UnsupportedModelError, match=r"scoring_func=7 .*glm4moe\.expert_gating_func"):
        describe_model(read_model_config(file), "auto", gguf=file)


def test_experts_in_two_forms(tmp_path: Path) -> None:
    stacked, single = floats(torch.ones(2, 8, 256)), floats(torch.ones(8, 256))
    tensors = {"blk.0.ffn_gate_exps.weight": stacked, "blk.0.ffn_gate.1.weight": single}
    message = (
        r"experts\.1\.gate_proj\.weight .* twice: blk\.0\.ffn_gate_exps\.weight .*, and blk\.0\.ffn_gate\.1\.weight in "
    )
    with pytest.raises(CheckpointError, match=message):
        StackedExperts(source_of(tmp_path, tensors))
    both = {f"blk.0.ffn_{name}_exps.weight": floats(torch.ones(2, 8, 256)) for name in ("gate", "gate_up")}
    with pytest.raises(
        CheckpointError, match=r"0\.gate_proj\.weight .*ffn_gate_up_exps\.weight .*ffn_gate_exps\.weight"
    ):
        StackedExperts(source_of(tmp_path, both))
    for name, stack, shape in (("ffn_up_exps", "up_proj", (8, 256)), ("ffn_gate_up_exps", "gate_up_proj", (2, 7, 256))):
        with pytest.raises(CheckpointError, match=rf"{stack} of the model\) has shape "):
            StackedExperts(source_of(tmp_path, {f"blk.0.{name}.weight": floats(torch.ones(shape))}))
