"""An engine whose transfers are held by the test, while requests are aborted and preempted, caches are reset, and steps fail.

`MockEngine` checks each token, and each block that a step reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.errors import ErrorKind
from inflight.interface.request import FinishReason
from inflight.interface.statistics import TransferCounts
from inflight.scheduler import kv_transfers
from tests.support.mock_engine import MockEngine
from tests.support.mock_transfers import MockTransfers, Object

TIER = KVTierConfig(type="fs", path="/nowhere")
PROMPT = list(range(1, 22))  # 5 blocks of 4, and a token
OTHER = [40] * 3  # it fills no block, so nothing is looked for
STATES = ("save", "stored", "fetch", "load")


class HeldTransfers(MockTransfers):
    """Calls end at once, but not the actions in `held`."""

    def __init__(self, tiers: dict[bytes, Object]) -> None:
        super().__init__(random.Random(0), tiers)
        self.held: set[str] = set()
        self._actions: dict[int, str] = {}  # id of a future -> its action

    def call(self, executor: Any, action: str, *args: Any) -> Future[Any]:
        future = super().call(executor, action, *args)
        self._actions[id(future)] = action
        return future

    @property
    def waiting(self) -> list[str]:
        return [self._actions[id(call.future)] for call in self._calls]

    def advance(self, *, is_needed: bool = False) -> None:
        while ready := [
            each for each in self._calls if each.may_end and self._actions[id(each.future)] not in self.held
        ]:
            self._end(ready[0])

    def fail_next(self) -> None:
        """The oldest call has the answer that its copies failed."""
        call = self._calls.pop(0)
        call.future.set_result([False])


@pytest.fixture(autouse=True)
def _requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfers, "UNKNOWN_WAIT_SECONDS", 1e6)
    monkeypatch.setattr(kv_transfers.KVTransfers, "_seconds_to_wait", lambda self, num_tokens: 1e6)


def make(tiers: dict[bytes, Object] | None = None, **config: Any) -> tuple[MockEngine, HeldTransfers]:
    transfers = HeldTransfers({} if tiers is None else tiers)
    transfer = KVTransferConfig(cpu_bytes=200, tiers=(TIER,), **config)
    engine = MockEngine(block_size=4, depth=2, fault_tolerance=True, transfer=transfer, transfers=transfers)
    return engine, transfers


def computed_before(**config: Any) -> tuple[MockEngine, HeldTransfers]:
    """An engine whose tiers have the blocks of PROMPT from another engine."""
    first, transfers = make()
    first.add("before", PROMPT)
    first.run()
    return make(transfers._tiers, **config)


def finish(engine: MockEngine, transfers: HeldTransfers) -> None:
    transfers.held.clear()
    engine.run()


def step_until(engine: MockEngine, is_there: Callable[[], object]) -> None:
    for _ in range(100):
        if is_there():
            return
        engine.step()
    raise AssertionError("it did not happen in 100 steps")


def counts(engine: MockEngine) -> TransferCounts:
    found = engine.scheduler.transfers.take_counts()
    assert found is not None
    return found


def brought_to(action: str, **config: Any) -> tuple[MockEngine, HeldTransfers]:
    """An engine with the request "r", and with a transfer for it that waits in this action."""
    engine, transfers = computed_before(**config) if action in ("fetch", "load") else make(**config)
    transfers.held = {action}
    engine.add("r", PROMPT, 20)
    step_until(engine, lambda: action in transfers.waiting)
    return engine, transfers


def test_a_prompt_that_was_computed_elsewhere_is_not_computed() -> None:
    engine, _ = computed_before()
    engine.add("r", PROMPT)
    engine.run()
    assert engine.cached_tokens["r"] == 20
    assert engine.worker.num_computed_tokens == len(PROMPT) - 20 + 7
    found = counts(engine)
    assert (found.num_fetched_blocks, found.num_loaded_blocks, found.num_hit_tokens) == (5, 5, 20)


@pytest.mark.parametrize("action", STATES)
def test_an_abort_in_each_state(action: str) -> None:
    engine, transfers = brought_to(action)
    engine.abort("r")
    engine.add("next", PROMPT)
    step_until(engine, lambda: not engine.core._in_flight or "next" in engine.finished)
    finish(engine, transfers)
    assert engine.finished == {"next": FinishReason.LENGTH}


@pytest.mark.parametrize("with_host_pool", [False, True])
@pytest.mark.parametrize("action", STATES)
def test_a_reset_in_each_state(action: str, with_host_pool: bool) -> None:
    engine, transfers = brought_to(action)
    engine.core.reset_prefix_cache(reset_connector=with_host_pool)
    if action in ("fetch", "load"):
        assert not engine.outputs["r"]
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.LENGTH}
    if action == "load":
        assert engine.cached_tokens["r"] == 0
    engine.scheduler.transfers.take_counts()


@pytest.mark.parametrize("action", STATES)
def test_a_failed_step_in_each_state(action: str) -> None:
    """The ranks begin a new epoch: the transfer is over, and the requests go on."""
    engine, transfers = brought_to(action)
    engine.add("other", OTHER, 20)
    engine.executor.failing[engine.executor.next_step_id] = False
    step_until(engine, lambda: engine.executor.recoveries)
    assert action not in transfers.waiting
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.LENGTH, "other": FinishReason.LENGTH}


@pytest.mark.parametrize("action", STATES)
def test_a_lost_rank_in_each_state(action: str) -> None:
    """Its arena and its host pool are empty, so nothing of them may be used."""
    engine, transfers = brought_to(action)
    engine.lose_arenas()
    engine.add("other", OTHER, 20)
    engine.executor.failing[engine.executor.next_step_id] = False
    step_until(engine, lambda: engine.executor.recoveries)
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.LENGTH, "other": FinishReason.LENGTH}


@pytest.mark.parametrize("action", ["save", "stored"])
def test_a_preemption_while_blocks_are_saved(action: str) -> None:
    engine, transfers = brought_to(action)
    engine.scheduler._requeue(engine.scheduler._running[0])
    engine.scheduler.check_integrity()
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.LENGTH}


def test_a_preempted_request_returns_from_the_host_pool() -> None:
    engine, _ = make()
    engine.add("r", PROMPT, 20)
    step_until(engine, lambda: len(engine.outputs["r"]) >= 8)
    while engine.core._in_flight:
        engine.core.collective_rpc("check_health")
    counts(engine)
    before = engine.worker.num_computed_tokens
    engine.scheduler._requeue(engine.scheduler._running[0])
    engine.scheduler._kv_cache.reset_prefix_cache([])  # others have evicted its blocks
    engine.run()
    assert counts(engine).num_loaded_blocks >= len(PROMPT) // 4 + 1
    assert engine.worker.num_computed_tokens - before < len(PROMPT)


def test_a_request_runs_while_another_waits() -> None:
    engine, transfers = brought_to("fetch")
    engine.add("other", OTHER)
    step_until(engine, lambda: "other" in engine.finished)
    assert "r" not in engine.finished and not engine.outputs["r"]
    finish(engine, transfers)
    assert engine.finished["r"] is FinishReason.LENGTH


def test_a_request_that_may_not_be_computed_ends_once_with_an_error() -> None:
    engine, transfers = brought_to("load", fails_if_not_loaded=True)
    transfers.fail_next()
    outputs = [output for _ in range(5) for output in engine.step()]
    (output,) = outputs
    assert (output.request_id, output.finish_reason) == ("r", FinishReason.ERROR)
    assert output.error_kind is ErrorKind.ENGINE
    engine.add("next", [40] * 9)
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.ERROR, "next": FinishReason.LENGTH}


def test_a_request_whose_load_failed_is_computed() -> None:
    engine, transfers = brought_to("load")
    transfers.fail_next()
    finish(engine, transfers)
    assert engine.finished == {"r": FinishReason.LENGTH}
    assert engine.cached_tokens["r"] == 0
    assert counts(engine).num_failed == 1


def test_completions_of_one_prompt_are_brought_once() -> None:
    engine, transfers = computed_before()
    for child in range(3):
        engine.add(f"c{child}", PROMPT, 4 + child, leader="c0" if child else None)
    engine.run()
    assert counts(engine).num_loaded_blocks == 5
    assert [engine.cached_tokens[f"c{child}"] for child in range(3)] == [20] * 3
    assert transfers.log.count("load") == 1


def test_prompt_log_probabilities_are_computed_whatever_is_cached() -> None:
    engine, transfers = computed_before()
    engine.add("r", PROMPT, prompt_logprobs=True)
    engine.run()
    assert transfers.log.count("fetch") == transfers.log.count("load") == 0


def test_another_salt_finds_nothing() -> None:
    engine, _ = computed_before()
    engine.add("r", PROMPT, salt="another tenant")
    engine.run()
    assert engine.cached_tokens["r"] == 0
    assert counts(engine).num_loaded_blocks == 0
