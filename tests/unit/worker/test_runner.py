"""What a runner asks of its parts: memory besides the KV cache, rows of the profile run, and a new beginning for a slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.interface.kv_cache import KVCacheSpec
from inflight.interface.step import NewRequestData
from inflight.layers.attention import Attention
from inflight.worker.model_runner import ModelRunner
from tests.unit.worker.driven import make_executor, workers_of, write_small_model
from tests.unit.worker.test_worker_phases import greedy_job, plan_ahead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("runner"))


def test_scratch_memory_is_reserved_once_for_each_kind_of_head(folder: Path) -> None:
    """It is memory of the backend, which all layers use one after another."""
    driven = make_executor(folder, 1, 1, 3)
    runner = workers_of(driven)[0].runner
    asked: set[tuple[int, int, int]] = set()

    def scratch_bytes(spec: KVCacheSpec, *, per_head: int, num_threads: int) -> int:
        asked.add((per_head, spec.head_dim, num_threads))
        return 100

    runner._backend.scratch_bytes = scratch_bytes  # type: ignore[method-assign]
    layer = next(iter(runner._model.cached_layers().values()))
    assert isinstance(layer, Attention)
    assert layer.num_heads > layer.num_kv_heads
    assert runner.reserved_bytes(0) == 100
    assert asked == {(layer.num_heads // layer.num_kv_heads, layer.head_dim, 1)}
    driven.executor.shutdown()


@pytest.mark.parametrize("max_drafts", [0, 2])
@torch.inference_mode()
def test_the_profile_run_draws_as_many_rows_as_the_largest_step(folder: Path, max_drafts: int) -> None:
    driven = make_executor(folder, 1, 1, 3, max_drafts)
    runner, num_rows = workers_of(driven)[0].runner, []
    compute_logits = runner._model.compute_logits

    def counted(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute_logits(hidden, *more)

    runner._model.compute_logits = counted  # type: ignore[assignment, method-assign]
    runner.profile_run()
    assert num_rows == [3 * (1 + max_drafts)]
    driven.executor.shutdown()


def test_a_request_that_gets_a_slot_does_not_get_the_index_of_its_tokens(folder: Path) -> None:
    driven = make_executor(folder, 1, 1, 3, 2)
    runner = workers_of(driven)[0].runner
    assert isinstance(runner, ModelRunner) and runner._drafts is not None
    begun: list[NewRequestData] = []
    assert runner._drafts._proposer is not None
    runner._drafts._proposer.begin = begun.extend  # type: ignore[assignment, method-assign]
    for name in ("first", "second"):
        job = greedy_job(name)
        plan_ahead(driven, [job]).run()
        assert begun.pop().slot == job.slot and not begun
    driven.executor.shutdown()
