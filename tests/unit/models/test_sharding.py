"""A model sharded over ranks, or cut into stages, computes what the whole model computes. The ranks are threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.engine import ModelConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import PipelineStage, pipeline_stage
from inflight.config.ranks import RankLayout
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError
from inflight.model_loader.checkpoint import open_file
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM, ModelStep
from tests.support.full_context_attention import FullContextAttention, bind_caches, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, reference_model, write_model

PROMPT = torch.arange(3, 40)
ALONE = TensorParallelGroup()


def load(
    folder: Path, load_format: str, tp: TensorParallelGroup = ALONE, stage: PipelineStage | None = None
) -> CausalLM:
    architecture = parse_architecture(json.loads((folder / "config.json").read_text()))
    config = ModelConfig(
        folder=folder,
        name="x",
        architecture=architecture,
        dtype="float32",
        max_model_len=64,
        load_format=load_format,
        seed=5,
        fingerprint="",
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    return load_model(config, device=torch.device("cpu"), backend=backend, tp=tp, stage=stage)


def run_stages(stages: list[CausalLM]) -> Tensor:
    """As `run_prompt`, from stage to stage."""
    passed: Tensor | IntermediateTensors | None = None
    metadata: Any = (None,)  # Any: the backend reads none
    for stage in stages:
        bind_caches(stage, len(PROMPT))
        assert passed is None or isinstance(passed, IntermediateTensors)
        passed = stage(ModelStep(PROMPT, torch.arange(len(PROMPT)), metadata, intermediate=passed))
    assert isinstance(passed, Tensor)
    return stages[-1].compute_logits(passed)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize(
    ("family", "index", "size"),
    [
        ("llama", 0, 2),
        ("llama", 0, 4),  # two key heads on four ranks
        ("llama", 1, 2),  # one key head
        ("llama", 6, 2),  # biases
        ("qwen3", 1, 4),  # tied, one key head, norms on heads
        ("qwen2", 3, 2),  # biases and windows
        ("gemma4", 0, 2),  # layers that read the cache of others, vectors of the tokens
        ("gemma4", 3, 2),  # experts beside the MLP
        ("gemma4", 1, 2),  # values that are keys, one of those heads
        ("qwen3_5", 0, 2),  # recurrent layers
        ("lfm2_moe", 0, 2),
        ("ernie4_5_moe", 0, 2),
        ("phimoe", 0, 2),  # LayerNorms, a head with a bias
        ("hunyuan_v1_moe", 1, 2),  # norms after the rotation
        ("qwen3_next", 0, 2),  # projections that are grouped by key heads
        ("lfm2", 1, 2),
        ("deepseek_v2", 0, 2),  # latent attention
        ("minicpm3", 0, 4),
        ("deepseek_v3", 2, 2),  # groups of experts, a bias for the choice, a shared expert
    ],
)
def test_the_ranks_together_are_the_whole(tmp_path: Path, family: str, index: int, size: int, load_format: str) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=2)
    truth = run_prompt(load(folder, load_format), PROMPT)
    worlds = ThreadWorlds(RankLayout(size, 1), timeout_seconds=60)

    def logits(rank: int) -> Tensor:
        return run_prompt(load(folder, load_format, worlds.of(rank).tensor_parallel_group("model")), PROMPT)

    with ThreadPoolExecutor(size) as ranks:
        found = list(ranks.map(logits, range(size)))
    torch.testing.assert_close(found[0], truth, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(found[0], other) for other in found)  # to the last bit


@pytest.mark.parametrize(("family", "index"), [("qwen3_next", 2), ("qwen3_5_moe", 0)])
@torch.inference_mode()
def test_two_ranks_are_as_near_to_exact_logits_as_one(tmp_path: Path, family: str, index: int) -> None:
    """In these models roundings grow from layer to layer, so that logits of one rank and of two may differ by more than 1e-4.
    The truth is computed in float64: over 18 random models the largest error of two ranks was 0.6 to 1.4 times that of one."""
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=2)
    truth = reference_model(folder, dtype=torch.float64)(PROMPT[None]).logits[0]
    one = run_prompt(load(folder, "safetensors"), PROMPT)
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)

    def logits(rank: int) -> Tensor:
        with torch.inference_mode():
            return run_prompt(load(folder, "safetensors", worlds.of(rank).tensor_parallel_group("model")), PROMPT)

    with ThreadPoolExecutor(2) as ranks:
        two, _ = ranks.map(logits, range(2))
    error_of_one, error_of_two = (float((each.double() - truth).norm() / truth.norm()) for each in (one, two))
    assert error_of_two < 2 * error_of_one < 1e-3


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize(
    ("family", "index", "partition"),
    [
        ("llama", 3, (1, 1, 1)),
        ("llama", 3, (1, 2)),
        ("qwen3", 4, (2, 1)),  # tied, windows
        ("qwen2", 3, (1, 2, 1)),
        ("phimoe", 0, (1, 1)),
        ("ernie4_5_moe", 1, (2, 4)),  # some layers have experts
    ],
)
def test_the_stages_one_after_the_other_are_the_whole(
    tmp_path: Path, family: str, index: int, partition: tuple[int, ...], load_format: str
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=2)
    whole = load(folder, load_format)
    stages = [load(folder, load_format, stage=pipeline_stage(partition, i)) for i in range(len(partition))]
    torch.testing.assert_close(run_stages(stages), run_prompt(whole, PROMPT), rtol=1e-5, atol=1e-5)
    names = [name for stage in stages for name in stage.cached_layers()]
    assert names == list(whole.cached_layers())
    assert [len(stage.cached_layers()) for stage in stages] == list(partition)


def test_a_stage_holds_only_its_own_weights(tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS["qwen3"][4], tmp_path / "model", seed=2)  # tied
    first, last = (load(folder, "safetensors", stage=pipeline_stage((2, 1), i)) for i in range(2))

    def names(model: CausalLM) -> set[str]:
        return {name for name, module in model.named_children() if module is not None} - {"rotaries"}

    assert names(first) == {"embed_tokens", "layers"}
    assert names(last) == {"layers", "norm", "lm_head"}
    table = first.get_parameter("embed_tokens.weight")
    hidden = torch.eye(table.shape[1])
    torch.testing.assert_close(last.compute_logits(hidden), table.T.contiguous())


@pytest.mark.parametrize("spoilt", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_every_stage_checks_the_whole_checkpoint(tmp_path: Path, spoilt: str, fault: str) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=2)
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(spoilt)
    if fault == "shape":
        tensors[spoilt] = tensor[:1].clone()
    save_file(tensors, folder / "model.safetensors")
    for pp_rank in range(2):
        with pytest.raises(CheckpointError, match=spoilt):
            load(folder, "safetensors", stage=pipeline_stage((1, 1), pp_rank))


def test_a_stage_does_not_read_the_weights_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that hold nothing of a stage are not opened for reading, only their headers are."""
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=2)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    opened: list[str] = []

    def watched(file: Path) -> Any:  # Any: a context manager
        opened.append(file.name.removesuffix(".safetensors"))
        return open_file(file)

    monkeypatch.setattr("inflight.model_loader.checkpoint.open_file", watched)
    load(folder, "safetensors", stage=pipeline_stage((1, 1), 1))
    again = {name for name in opened if opened.count(name) > 1}
    assert again == {name for name in tensors if name.startswith(("model.layers.1.", "model.norm", "lm_head"))}
