"""Every family on simulated GPUs, with a GPU's layers and kernels: the tokens of the CPU, tensor-parallel and in stages.

The ranks record their steps, and the recording refuses what CUDA refuses: reads of the device, copies from the host, and
tensors of two devices. So a family that passes has no such operation in its steps.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.worker.gpu.graph_model_runner import GraphModelRunner
from tests.support.fake_gpus import install_gpus
from tests.support.gpu_layers import use_gpu_layers
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.worker.gpu.test_several_gpus import tokens

CPU_ONLY = {  # latent attention and recurrent layers
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
    *("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
}
TWO_RANKS, TWO_STAGES = (2, 1), (1, 2)
SAMPLE = {("gpt_oss", 0, TWO_STAGES), ("gemma2", 0, TWO_RANKS)}  # what `make test` runs


def cases() -> list[object]:
    every = [
        (family, index, layout)
        for family, configs in FAMILY_CONFIGS.items()
        for index in range(len(configs))
        for layout in (TWO_RANKS, TWO_STAGES)
    ]
    return [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.full) for case in every]


@pytest.mark.parametrize(("family", "index", "layout"), cases())
def test_the_tokens_are_those_of_the_cpu(
    family: str, index: int, layout: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp, pp = layout
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=2)
    expected, _ = tokens(folder, 1, 1)
    install_gpus(monkeypatch, tp * pp)
    use_gpu_layers(monkeypatch)
    try:
        found, kinds = tokens(folder, tp, pp, device="cuda", cuda_graph_max_tokens=4)
    except ConfigError as error:
        why = "on CPUs only so far" if family in CPU_ONLY else "does not divide the model|must be in one stage"
        assert re.search(why, str(error))  # noqa: PT017
    else:
        assert family not in CPU_ONLY
        assert found == expected
        assert kinds == {GraphModelRunner}
