"""Busy experts get copies while replicas serve: the tokens are those of one engine, before, while and after they come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import SamplingParams
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.errors import ConfigError
from inflight.interface.expert_counts import ExpertCounts
from inflight.kernels.cpu.expert_balance import EMPTY
from inflight.kernels.cpu.library import load_kernels
from inflight.worker.expert_balance.balancer import ExpertBalancer
from inflight.worker.expert_balance.mover import ExpertMover
from inflight.worker.expert_worker import ExpertRunner
from tests.support.lockstep_engines import LockstepEngines
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.worker.test_expert_worker import worker_of

NEEDS_KERNELS = pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
NUM_REPLICAS = 3
ARGUMENTS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 1 << 21,
    "enable_eplb": True,
}
INTERVAL = 5
PROMPTS = [[3 + 7 * index, 4, 5 + index] for index in range(NUM_REPLICAS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path_factory.mktemp("balance") / "model", seed=1)


@pytest.fixture
def opened() -> Iterator[list[LockstepEngines]]:
    found: list[LockstepEngines] = []
    yield found
    for each in found:
        each.close()


def start(folder: Path, opened: list[LockstepEngines], **config: Any) -> LockstepEngines:
    config = {"step_interval": INTERVAL, "window_size": INTERVAL, **config}
    opened.append(LockstepEngines(folder, NUM_REPLICAS, eplb_config=config, **ARGUMENTS))
    return opened[0]


def balancers(group: LockstepEngines) -> list[ExpertBalancer]:
    runners = [worker_of(engine).runner for engine in group.engines]
    return [runner.balancer for runner in runners if isinstance(runner, ExpertRunner)]


def generate(group: LockstepEngines, max_tokens: int = 2 * INTERVAL) -> list[list[int]]:
    def work(engine: LLMEngine, index: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request("r", PROMPTS[index], params)
        outputs: list[Any] = []
        while not outputs:
            outputs = engine.step()
        tokens: list[int] = outputs[0].outputs[0].token_ids
        return tokens

    return list(group.run(work))


def copies_of(group: LockstepEngines) -> list[int]:
    """How many copies each rank uses."""
    return [int((each._now != EMPTY).sum()) for each in balancers(group)]


def total(found: list[ExpertCounts | None]) -> ExpertCounts:
    counts = [each for each in found if each is not None]
    assert len(counts) == NUM_REPLICAS
    events = {(each.num_ranks, each.num_rebalances, each.num_copies, each.num_given_up) for each in counts}
    assert len(events) == 1, "all ranks see the same"
    return counts[0]


@NEEDS_KERNELS
def test_the_step_after_a_decision_uses_the_copies_if_it_waits_for_them(
    folder: Path, opened: list[LockstepEngines], caplog: pytest.LogCaptureFixture
) -> None:
    group = start(folder, opened, use_async=False, log_balancedness=True, num_redundant_experts=5)
    assert copies_of(group) == [0] * NUM_REPLICAS
    before = generate(group, INTERVAL)
    with caplog.at_level("INFO"):
        after = generate(group)
    assert [tokens[:INTERVAL] for tokens in after] == before
    assert min(copies_of(group)) > 0
    assert generate(group) == after, "with the copies from the start"
    counts = total([each.take_counts() for each in balancers(group)])
    assert counts.num_ranks == NUM_REPLICAS and counts.num_rebalances > 0 and counts.num_given_up == 0
    assert counts.num_copies >= max(copies_of(group))
    assert counts.balance is not None and 1 / NUM_REPLICAS <= counts.balance <= 1
    assert total([each.take_counts() for each in balancers(group)]) == ExpertCounts(NUM_REPLICAS)
    assert "without copies" in caplog.text and "are used" in caplog.text


@NEEDS_KERNELS
def test_copies_come_beside_the_steps(folder: Path, opened: list[LockstepEngines]) -> None:
    group = start(folder, opened)
    before = generate(group)
    while not min(copies_of(group)):
        assert generate(group) == before
    assert generate(group) == before


@NEEDS_KERNELS
def test_a_move_that_stalls_is_given_up(
    folder: Path, opened: list[LockstepEngines], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on without the copies. When the rank goes on, later moves are made."""
    goes_on = threading.Event()
    original = ExpertMover._send

    def stalled(mover: ExpertMover, *move: Any) -> None:
        goes_on.wait()
        original(mover, *move)

    monkeypatch.setattr(ExpertMover, "_send", stalled)
    group = start(folder, opened)
    expected = generate(group)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            assert generate(group) == expected
    assert copies_of(group) == [0] * NUM_REPLICAS
    counts = total([each.take_counts() for each in balancers(group)])
    assert counts.num_given_up > 1 and counts.num_rebalances == counts.num_copies == 0
    assert "copies of experts are given up" in caplog.text
    goes_on.set()
    while not min(copies_of(group)):
        assert generate(group) == expected


@NEEDS_KERNELS
def test_a_broken_channel_leaves_the_experts_where_they_are(
    folder: Path, opened: list[LockstepEngines], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(mover: ExpertMover, *move: Any) -> None:
        for channel in mover._channels.values():
            channel.close()
        raise OSError("no route to host")

    monkeypatch.setattr(ExpertMover, "_send", broken)
    group = start(folder, opened, use_async=False)
    expected = generate(group)
    assert generate(group) == expected and copies_of(group) == [0] * NUM_REPLICAS
    assert "no more experts are copied: no route to host" in caplog.text


@NEEDS_KERNELS
def test_when_the_ranks_meet_again_no_expert_has_copies(folder: Path, opened: list[LockstepEngines]) -> None:
    group = start(folder, opened, use_async=False)
    expected = generate(group)
    assert min(copies_of(group)) > 0
    lost = worker_of(group.engines[0])
    lost._experts.leave()  # its next step fails, so all begin a new epoch
    assert generate(group) == expected
    assert all(sum(engine.core.fault_status().num_recoveries.values()) == 1 for engine in group.engines)
    assert min(copies_of(group)) > 0, "they have come again"
    for each in balancers(group):
        each.begin({})
    assert copies_of(group) == [0] * NUM_REPLICAS


def test_without_the_kernels_it_is_refused(
    folder: Path, opened: list[LockstepEngines], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("layers.context", "distributed.replica_experts"):
        monkeypatch.setattr(f"inflight.{place}.load_kernels", lambda: None)
    with pytest.raises(ConfigError, match="enable_eplb=True needs the C"):
        start(folder, opened)
