"""Layers among stages, heads among ranks."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from inflight.config.architecture import GatedMlpSpec, LayerSpec, TokenInputsSpec
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.partition import (
    check_tensor_parallel_size,
    head_cost,
    layer_cost,
    partition_by_cost,
    resolve_partition,
)
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.ranks import RankLayout
from inflight.errors import ConfigError
from tests.unit.config.test_resolve import ARCHITECTURE, resolved


def test_ranks_of_a_stage_are_neighbours() -> None:
    layout = RankLayout(2, 3)
    assert layout.world_size == 6
    assert [(layout.pp_rank(rank), layout.tp_rank(rank)) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [layout.rank(tp_rank, pp_rank) for pp_rank in range(3) for tp_rank in range(2)] == list(range(6))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0, 3, 10, 25, 1000])
def test_no_partition_has_a_cheaper_slowest_stage(num_stages: int, head: int) -> None:
    num_layers, layer = 9, 10

    def slowest(counts: tuple[int, ...]) -> int:
        return max(*(count * layer for count in counts), counts[-1] * layer + head)

    found = partition_by_cost(num_layers, num_stages, layer, head)
    every = [
        counts for counts in itertools.product(range(1, num_layers + 1), repeat=num_stages) if sum(counts) == num_layers
    ]
    assert found in every
    assert slowest(found) == min(map(slowest, every))
    assert max(found[:-1], default=0) - min(found[:-1], default=0) <= 1  # nothing is piled up on one stage


def test_the_head_counts_for_a_quarter_of_its_weights() -> None:
    """Qwen3-0.6B: a vocabulary as large as ten layers."""
    qwen = replace(
        ARCHITECTURE,
        vocab_size=151936,
        hidden_size=1024,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, rope=RopeConfig()),
                mlp=GatedMlpSpec(size=3072),
            ),
        )
        * 28,
    )
    assert head_cost(qwen) / layer_cost(qwen) == pytest.approx(9.9, abs=0.1)
    assert resolve_partition(None, qwen, 2) == (15, 13)
    assert resolve_partition(None, qwen, 4) == (8, 8, 7, 5)
    assert resolve_partition(None, qwen, 1) == (28,)


def test_stages_of_a_partition() -> None:
    stages = [pipeline_stage((3, 2, 1), pp_rank) for pp_rank in range(3)]
    assert [(stage.start, stage.stop) for stage in stages] == [(0, 3), (3, 5), (5, 6)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    (whole,) = [pipeline_stage((6,), 0)]
    assert whole.is_first
    assert whole.is_last


def test_a_partition_that_is_given() -> None:
    config = resolved(
        replace(ARCHITECTURE, layers=ARCHITECTURE.layers[:1] * 6),
        pipeline_parallel_size=3,
        pipeline_layer_partition="1, 3,2",
    )
    assert config.parallel.pipeline_layer_partition == (1, 3, 2)


@pytest.mark.parametrize("text", ["1", "1,0", "1,2", "2,-1", "1,1,0", "a,b", "1,1,", "1.0,1"])
def test_a_partition_that_does_not_fit(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2 numbers .*2 layers"):
        resolved(pipeline_parallel_size=2, pipeline_layer_partition=text)


def test_an_empty_partition() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_layer_partition=''"):
        resolved(pipeline_parallel_size=2, pipeline_layer_partition="")


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size=3.* at most 2"):
        resolved(pipeline_parallel_size=3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "works"),
    [
        (8, 8, 64, "1, 2, 4, 8"),
        (8, 1, 64, "1, 2, 4, 8"),  # one key head on all
        (12, 4, 96, "1, 2, 4, 12"),  # 3 or 6 ranks cannot share 4 key heads evenly
        (8, 2, 36, "1, 2, 4"),
        (7, 7, 70, "1, 7"),
        (128, 128, 128, "1, 2, 4, 8, 16, 32, 64, 128"),  # eight sizes are the most that are shown
        (256, 256, 256, "1, 2, 4, 8, 16, 32, 64, 128, ..."),
    ],
)
def test_sizes_that_work_are_named(heads: int, kv_heads: int, intermediate: int, works: str) -> None:
    architecture = replace(
        ARCHITECTURE,
        layers=(
            LayerSpec(
                mixer=AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=16, rope=None),
                mlp=GatedMlpSpec(size=intermediate),
            ),
        ),
    )
    for size in (int(text) for text in works.removesuffix(", ...").split(", ")):
        check_tensor_parallel_size(size, architecture)
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size=5 .*{re.escape(works)}$"):
        resolved(architecture, tensor_parallel_size=5)


def test_layers_that_must_be_in_one_stage() -> None:
    """One reads the keys of another, or all read the embeddings of the tokens."""
    layer = ARCHITECTURE.layers[0]
    assert layer.attention is not None
    reader = replace(layer, mixer=replace(layer.attention, kv_layer=1))
    shared = replace(ARCHITECTURE, layers=(layer, layer, reader, layer))
    assert resolve_partition("1,2,1", shared, 3) == (1, 2, 1)
    with pytest.raises(ConfigError, match=r"layer 2 .*layer 1, .*2,2"):
        resolve_partition("2,2", shared, 2)
    inputs = TokenInputsSpec(vocab_size=9, size=4, activation="gelu")
    told = replace(ARCHITECTURE, layers=(layer,) * 4, token_inputs=inputs)
    assert resolve_partition(None, told, 1) == (4,)
    with pytest.raises(ConfigError, match="which only the first stage has; use 1"):
        resolve_partition(None, told, 2)
