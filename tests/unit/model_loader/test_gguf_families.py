"""GGUF files of families with latent attention, recurrent layers or short convolutions, and folders with the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType
from torch import Tensor

from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.ranks import RankLayout
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError, UnsupportedModelError
from inflight.kernels.quantized_weight import quantize_rows
from inflight.model_loader.gguf_order import select_columns
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.full_context_attention import run_prompt
from tests.support.gguf_writer import CASES, write_file
from tests.unit.model_loader.test_gguf_source import as_floats, load

PROMPT = torch.randint(203, (23,), generator=torch.Generator().manual_seed(2))


def assert_close(found: Tensor, truth: Tensor) -> None:
    """ssm_a and norms are rounded on their way into the file and back."""
    assert truth.std() > 0.5, "logits that are all alike would agree whatever the order of rows is"
    assert relative_difference(found, truth) < FLOAT32_TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_of_its_weights(
    tmp_path: Path, case: str, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, file = write_file(tmp_path, case, kind)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert_close(run_prompt(load(file), PROMPT), run_prompt(load(plain), PROMPT))


@pytest.mark.parametrize(
    "case",
    [
        *(
            "deepseek2",
            "deepseek2, sigmoids",
            "lfm2moe",
            "qwen35moe",
            "ernie4_5-moe",
            "gemma4",
            "hunyuan-moe",
            "phimoe",
        ),
        "qwen3next, 2025",
    ],
)
def test_the_metadata_is_that_of_config_json(tmp_path: Path, case: str) -> None:
    plain, file = write_file(tmp_path, case)
    ours, theirs = (parse_architecture(read_model_config(path)) for path in (file, plain))
    assert ours.layers == theirs.layers and ours.name == theirs.name


@torch.inference_mode()
@pytest.mark.parametrize("case", ["deepseek2", "deepseek2, sigmoids"])
def test_keys_and_values_in_one_tensor(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, file = write_file(tmp_path, case, joins_keys_and_values=True)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert_close(run_prompt(load(file), PROMPT), run_prompt(load(plain), PROMPT))


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, file = write_file(tmp_path, case)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)

    def logits(rank: int) -> Tensor:
        with torch.inference_mode():
            return run_prompt(load(file, worlds.of(rank).tensor_parallel_group("model")), PROMPT)

    with ThreadPoolExecutor(2) as ranks:
        found, other = ranks.map(logits, range(2))
    assert torch.equal(found, other)
    assert_close(found, run_prompt(load(plain), PROMPT))


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (
            "lfm2moe",
            {"add_expert_gating_func": ExpertGatingFuncType.SOFTMAX},
            "scoring_func='softmax' is not supported",
        ),
        ("deepseek2, sigmoids", {"add_expert_group_count": 3}, "8 experts cannot be divided into 3 groups"),
        ("deepseek2", {"add_expert_weights_norm": True}, "norm_topk_prob=True is not supported"),
        ("qwen35moe", {"add_expert_weights_norm": False}, "norm_topk_prob=False is not supported"),
        ("hunyuan-moe", {"add_expert_shared_count": 2}, "num_shared_expert=2 is not supported"),
        ("hunyuan-moe", {"add_expert_shared_feed_forward_length": 95}, "expert_shared_feed_forward_length=95"),
        ("phimoe", {"add_rope_dimension_count": 8}, "partial_rotary_factor=0.5"),
        ("gemma4, experts", {"add_expert_used_count": 7}, "top_k_experts=7 is more than the number of experts, 6"),
        ("qwen35", {"add_ssm_inner_size": 100}, r"ssm\.inner_size=100 and ssm\.time_step_rank=6 give no size"),
        ("qwen3next", {"add_ssm_time_step_rank": 4, "add_ssm_inner_size": 128}, r"blk\.0\.ssm_ba\.weight has shape"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, case: str, change: dict[str, Any], words: str) -> None:
    def write(writer: Any) -> None:  # Any: the package's writer, whose keys are written once
        for name, value in change.items():
            for data in writer.kv_data:
                data.pop(_key(name, CASES[case][0]), None)
            getattr(writer, name)(value)

    _, file = write_file(tmp_path, case, change=write)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load(file)


def _key(name: str, architecture: str) -> str:
    stem = name.removeprefix("add_").replace("ssm_", "ssm.")
    return f"{architecture}.{stem}"


def test_layers_that_predict_drafts_are_not_read(tmp_path: Path) -> None:
    """The file counts them among all layers."""

    def write(writer: Any) -> None:  # Any: the package's writer
        writer.kv_data[0].pop("qwen35moe.block_count")
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", torch.ones(4, 4).numpy())

    _, file = write_file(tmp_path, "qwen35moe", change=write)
    assert len(load(file).cached_layers()) == 4


def test_which_family_a_file_of_deepseek2_has(tmp_path: Path) -> None:
    """Files of 2025 do not say how many groups there are."""

    def write(writer: Any) -> None:  # Any: the package's writer
        for name in ("expert_group_count", "expert_group_used_count"):
            writer.kv_data[0].pop(f"deepseek2.{name}")

    names = []
    for case in ("deepseek2", "deepseek2, sigmoids"):
        _, file = write_file(tmp_path / case, case, change=write)
        model = parse_architecture(read_model_config(file))
        router: Any = model.layers[-1].mlp  # Any: a specification of experts
        assert (router.router.num_groups, router.router.top_groups) == (1, 1)
        names.append(model.name)
    assert names == ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 32), (4, 64)])
@pytest.mark.parametrize("run", [8, 16, 32, 64])
def test_columns_in_another_order(bits: int, group_size: int, run: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = quantize_rows(torch.randn(5, 192, generator=generator), bits=bits, group_size=group_size)
    columns = torch.randperm(192 // run, generator=generator)[:, None] * run + torch.arange(run)
    found = select_columns(weight, columns.flatten(), run)
    assert torch.equal(as_floats(found), weight.dequantize()[:, columns.flatten()])
    assert isinstance(found, Tensor) is (bits == 4 and run == 8)
