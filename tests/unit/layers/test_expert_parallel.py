"""A layer whose experts are divided among ranks gives the bits of one rank that has them all, whoever exchanges the rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.expert_parallel import expert_room
from inflight.config.parse_architecture import parse_architecture
from inflight.config.ranks import RankLayout
from inflight.distributed import expert_parallel
from inflight.distributed.collectives import Collectives
from inflight.distributed.expert_parallel import ExpertParallelGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.thread_world import ThreadWorlds
from inflight.hub import read_config
from inflight.kernels.cpu.library import load_kernels
from inflight.layers.moe import FusedMoE
from inflight.model_loader.loader import load_model
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.distributed.test_collectives import exchanges, share
from tests.unit.layers.zoo_layers import drawn

NO_KERNELS = pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
# family -> configuration: plain experts; a shared one with a gate; biases; groups and a bias for the choice
FAMILIES = {"qwen3_moe": 0, "qwen2_moe": 0, "gpt_oss": 0, "glm4_moe": 1}
ROWS = (1, 7, 40)


def model_config(folder: Path, quantization: str | None = None) -> ModelConfig:
    return ModelConfig(
        folder=folder,
        name="zoo",
        architecture=parse_architecture(read_config(folder)),
        dtype="float32",
        max_model_len=64,
        load_format="safetensors",
        seed=0,
        fingerprint="",
        quantization=QuantizationConfig(layers=quantization, head=None, group_size=32),
    )


def layers_of(config: ModelConfig, tp: TensorParallelGroup, ep: ExpertParallelGroup | None) -> list[FusedMoE]:
    model = load_model(config, device=torch.device("cpu"), backend=TorchSdpaBackend(), tp=tp, ep=ep)
    found = [module for module in model.modules() if isinstance(module, FusedMoE)]
    assert found
    return found


@pytest.fixture
def opened() -> Iterator[list[Collectives]]:
    found: list[Collectives] = []
    yield found
    for each in found:
        each.close()


def connect(kind: str, size: int, opened: list[Collectives]) -> list[Collectives]:
    if kind == "shared":
        connected = exchanges(size)
        shared = [each for each in share(connected, [load_kernels()] * size) if each is not None]
        for exchange in connected:
            exchange.close()
        opened.extend(shared)
    else:
        worlds = ThreadWorlds(RankLayout(size, 1), 60.0)
        opened.extend(worlds.of(rank).collectives("model") for rank in range(size))
    assert len(opened) == size
    return opened


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, unless torch's library computes the products: its results depend on the number of rows."""
    if load_kernels() is None:
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", [pytest.param("shared", marks=NO_KERNELS), "threads"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_replicas_that_share_experts_give_the_bits_of_one_rank(
    family: str,
    kind: str,
    quantization: str | None,
    opened: list[Collectives],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replica has rows of its own, some of them none. They are exchanged in several rounds."""
    if quantization is not None and load_kernels() is None:
        pytest.skip("quantized weights need the C++ kernels")
    monkeypatch.setattr(expert_parallel, "_ROWS_AT_ONCE", 8)
    config = model_config(
        write_model(FAMILY_CONFIGS[family][FAMILIES[family]], tmp_path / "model", seed=1), quantization
    )
    alone = layers_of(config, TensorParallelGroup(), None)
    size, tp = 3, TensorParallelGroup()
    room = expert_room(config.architecture, 1)
    monkeypatch.setattr(expert_parallel, "_MOST_BYTES", 8 * size * 4 * room.choices_per_row * room.hidden_size)
    groups = [ExpertParallelGroup(tp, room, num_replicas=size, replica=index) for index in range(size)]
    ranks = [layers_of(config, tp, group) for group in groups]
    counts = [len(layers[0].experts) - layers[0].num_shared for layers in ranks]
    assert sum(counts) == config.architecture.layers[-1].mlp.num_experts and max(counts) - min(counts) < 2  # type: ignore[attr-defined]
    collectives = connect(kind, size, opened)
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda index: groups[index].connect(collectives[index]), range(size)))
        assert all((group.rows is not None) is (kind == "shared") for group in groups)
        for numbers in ((1, 0, 0), (7, 1, 40), (0, 16, 8), (0, 0, 0)):
            rows = [drawn(number, room.hidden_size, seed=number + index) for index, number in enumerate(numbers)]
            for place, layer in enumerate(alone):

                def compute(index: int, place: int = place, rows: list[Tensor] = rows) -> Tensor:
                    with torch.inference_mode():
                        result: Tensor = ranks[index][place](rows[index])
                        return result

                for found, given in zip(threads.map(compute, range(size)), rows, strict=True):
                    assert_same(found, layer(given) if len(given) else given)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [pytest.param("shared", marks=NO_KERNELS), "threads"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_ranks_with_the_same_rows_give_the_bits_of_one_rank(
    family: str, kind: str, size: int, opened: list[Collectives], tmp_path: Path
) -> None:
    """Without a shared expert nothing but the experts is divided, so that one rank has the same bits."""
    config = model_config(write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1))
    alone = layers_of(config, TensorParallelGroup(), None)
    collectives = connect(kind, size, opened)
    room = expert_room(config.architecture, size)
    tps = [TensorParallelGroup(size, rank) for rank in range(size)]
    groups = [ExpertParallelGroup(tp, room) for tp in tps]
    ranks = [layers_of(config, TensorParallelGroup(), group) for group in groups]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda rank: groups[rank].connect(collectives[rank]), range(size)))
        for number in ROWS:
            rows = drawn(number, room.hidden_size, seed=number)
            for place, layer in enumerate(alone):

                def compute(rank: int, place: int = place, rows: Tensor = rows) -> Tensor:
                    with torch.inference_mode():
                        result: Tensor = ranks[rank][place](rows)
                        return result

                for found in threads.map(compute, range(size)):
                    assert_same(found, layer(rows))
