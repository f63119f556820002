"""The largest step that a rank tries: its inputs, its layers, and what it leaves as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inflight.config.architecture import TRANSFORMERS
from inflight.interface.kv_cache import DUMMY_BLOCK
from inflight.worker import profile_run as module
from inflight.worker.profile_run import one_token_each, run_largest_step, zero_activations
from tests.conformance.configs import engine_config


@dataclass(frozen=True)
class Spec:
    kind: str
    block_bytes: int


class Layer:
    """A layer with a cache; `kind` and `block_bytes` are those of its spec."""

    def __init__(self, kind: str, block_bytes: int, number: int) -> None:
        self.spec = Spec(kind=kind, block_bytes=block_bytes)
        self.kv_cache: Any = f"cache {number}"
        self.group_index = 10 + number
        self.bound: list[Any] = []

    def bind(self, cache: Any, index: int) -> None:
        self.bound.append((cache, index))


class Bench:
    """Four layers in two stages of a model; layers 1 and 3 are of one kind. 20 tokens of prompts of at most 8."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, implementation: str = "inflight") -> None:
        self.layers = [
            Layer(kind, size, i) for i, (kind, size) in enumerate([("a", 30), ("b", 50), ("c", 40), ("b", 50)])
        ]
        config = engine_config()
        kinds: Any = ("early", "a", "b", "c", "b", "late")
        architecture = replace(config.model.architecture, layers=kinds, implementation=implementation)
        self.config = replace(
            config,
            model=replace(config.model, architecture=architecture, max_model_len=8),
            cache=replace(config.cache, block_size=3),
            scheduler=replace(config.scheduler, max_num_batched_tokens=20),
        )
        self.drawn: list[Any] = []
        self.steps: list[Any] = []
        self.arenas: list[Any] = []
        monkeypatch.setattr(module, "ModelStep", lambda *args, **named: (args, named))
        monkeypatch.setattr(module, "cache_spec", lambda layer, _: layer.spec)

    def arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        self.arenas.append((num_blocks, block_bytes))
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)

    def run(self, *, is_last: bool = True, fails: bool = False) -> None:
        def compute(step: Any) -> str:
            self.steps.append(step)
            if fails:
                raise MemoryError
            return "hidden"

        backend: Any = SimpleNamespace(
            layer_cache=lambda part, spec, index: ("bound", part.shape[1], spec.kind, index),
            metadata_builder=lambda spec: lambda inputs: (inputs, spec.kind),
        )
        device: Any = SimpleNamespace(
            allocate_arena=self.arena, to_device=torch.from_numpy, torch_device=torch.device("cpu")
        )
        stage: Any = SimpleNamespace(start=1, stop=5, is_first=False, is_last=is_last)
        model: Any = type(
            "Model", (), {"cache_users": lambda _: self.layers, "__call__": lambda _, step: compute(step)}
        )()
        run_largest_step(self.config, model, backend, device, stage, self.drawn.append)


def test_one_layer_of_each_kind_computes_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.run()
    ((args, named),) = bench.steps
    ids, positions, metadata = args
    assert ids.tolist() == [0] * 20
    assert positions.tolist() == [*range(8), *range(8), *range(4)]
    assert [kind for _, kind in metadata] == ["a", "b", "c"]
    assert named["layers"] == [0, 1, 2]
    inputs = metadata[0][0]
    assert inputs.query_start_loc.tolist() == [0, 8, 16, 20]
    assert inputs.seq_lens.tolist() == [8, 8, 4]
    assert inputs.num_computed_tokens.tolist() == [0, 0, 0]
    assert inputs.block_table.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "each prompt has its own"
    assert bench.arenas == [(10, 50)]
    assert bench.drawn == ["hidden"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_layers_have_their_caches_again(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    bench = Bench(monkeypatch)
    if fails:
        with pytest.raises(MemoryError):
            bench.run(fails=True)
    else:
        bench.run()
    for number, (kind, size) in enumerate([("a", 30), ("b", 50), ("c", 40)]):
        assert bench.layers[number].bound == [(("bound", size, kind, 0), number), (f"cache {number}", 10 + number)]
    assert bench.layers[3].bound == []


def test_only_the_last_stage_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.run(is_last=False)
    assert (len(bench.steps), bench.drawn) == (1, [])


def test_layers_of_transformers_are_of_one_kind_if_their_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, implementation=TRANSFORMERS)
    bench.layers[2].spec = bench.layers[0].spec
    bench.run()
    assert bench.steps[0][1]["layers"] == [0, 1]
    assert bench.arenas == [(10, 50)]


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_sequences_of_one_token_are_in_the_dummy_block(num_tokens: int) -> None:
    inputs = one_token_each(num_tokens)
    assert inputs.query_start_loc.tolist() == list(range(num_tokens + 1))
    assert inputs.seq_lens.tolist() == [1] * num_tokens
    assert inputs.num_computed_tokens.tolist() == [0] * num_tokens
    assert inputs.block_table.tolist() == [[DUMMY_BLOCK]] * num_tokens
    assert inputs.block_table.dtype == np.int32


def test_only_later_stages_get_activations_and_these_are_zeros() -> None:
    config, device = engine_config(), SimpleNamespace(torch_device=torch.device("cpu"))
    for is_first in (True, False):
        stage = SimpleNamespace(is_first=is_first)
        found = zero_activations(config, stage, device, 3)  # type: ignore[arg-type]
        assert (found is None) == is_first
    assert found is not None
    for part in (found.delta, found.residual):
        assert part.shape == (3, 8)
        assert not part.any()
    assert found.delta.dtype == torch.float32
