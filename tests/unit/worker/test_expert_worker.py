"""A rank whose replica divides the experts with another: steps without rows, and calls that are no steps of the group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight import SamplingParams
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.worker.expert_worker import ExpertRunner, ExpertWorker
from tests.support.lockstep_engines import LockstepEngines
from tests.support.model_zoo import FAMILY_CONFIGS, write_model


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockstepEngines]:
    folder = write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path_factory.mktemp("experts") / "model", seed=1)
    found = LockstepEngines(
        folder, 2, dtype="float32", skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=1 << 21
    )
    yield found
    found.close()


def generate(engine: LLMEngine, prompt: list[int]) -> list[int]:
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    tokens: list[int] = outputs[0].outputs[0].token_ids
    return tokens


def worker_of(engine: LLMEngine) -> ExpertWorker:
    executor: Any = engine.executor  # Any: its threads are private
    worker = executor._ranks[0].loop._worker
    assert isinstance(worker, ExpertWorker)
    return worker


def test_a_replica_without_rows_computes_its_experts_for_the_other(group: LockstepEngines) -> None:
    alone = group.run(lambda engine, index: generate(engine, [3, 4, 5]) if index == 0 else [])[0]
    both = group.run(lambda engine, index: generate(engine, [3, 4, 5]))
    assert both == [alone, alone]
    idle = worker_of(group.engines[1])
    assert isinstance(idle.runner, ExpertRunner) and len(idle.runner._mixtures) > 1
    forwards = [event for event in idle.timeline_events() if event.phase == "forward"]
    assert len(forwards) >= 12, "those of 6 steps without rows, and of 6 with a row"


def test_a_call_that_computes_waits_for_no_other_replica(group: LockstepEngines) -> None:
    """And steps go on afterwards as before it."""

    def check(engine: LLMEngine, index: int) -> list[int]:
        before = generate(engine, [7, 8])
        if index == 0:
            engine.core.collective_rpc("check_health")
        assert generate(engine, [7, 8]) == before
        return before

    first, second = group.run(check)
    assert first == second
