"""`GuardedTier`: deadlines, places, breakers and counts. Nothing depends on how fast a machine is."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from inflight.kv_connector.guarded_tier import COUNTS, AbandonedError, GuardedTier
from inflight.kv_connector.tier import Tier
from tests.support.kv_tier_examples import DictTier, LyingTier, RaisingTier, WaitingTier
from tests.support.waits import wait_until

NAME = b"n" * 32


def guard(tier: Tier, seconds: float = 300.0, places: int = 4, **more: Any) -> GuardedTier:
    return GuardedTier(tier, label="custom", timeout_seconds=seconds, max_operations=places, **more)


def counts(tier: GuardedTier) -> dict[str, float]:
    """Those that are not 0, without times."""
    found = tier.take_counts()
    assert tuple(found) == tuple(COUNTS)
    return {name: number for name, number in found.items() if number and not name.endswith("seconds")}


def buffer(text: bytes = b"") -> memoryview:
    return memoryview(bytearray(text.ljust(16, b".")))


def test_what_is_counted() -> None:
    tier = guard(DictTier({"objects": {}}))
    into = buffer()
    assert tier.get(NAME, into) is None
    assert tier.put(NAME, buffer(b"text"))
    assert tier.get(NAME, into) == 16 and bytes(into[:5]) == b"text."
    found = tier.take_counts()
    assert found["read_seconds"] > 0 and found["written_seconds"] > 0
    assert {k: v for k, v in found.items() if v and "seconds" not in k} == {
        "misses": 1, "stored": 1, "read_bytes": 16, "written_bytes": 16,
    }  # fmt: skip
    tier.discard(NAME)
    assert tier.get(NAME, into) is None
    assert counts(tier) == {"misses": 1}
    tier.close()


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_failures_are_counted_and_open_the_breaker_of_their_kind(error: BaseException) -> None:
    now = 0.0
    tier = guard(RaisingTier({"error": error}), clock=lambda: now)
    for _ in range(5):
        assert not tier.put(NAME, buffer())
    assert counts(tier) == {"errors": 3, "rejected": 2}
    for _ in range(4):
        assert tier.get(NAME, buffer()) is None
    assert counts(tier) == {"errors": 3, "rejected": 1}
    now = 1.0
    assert tier.get(NAME, buffer()) is None and tier.get(NAME, buffer()) is None
    assert counts(tier) == {"errors": 1, "rejected": 1}
    tier.close()


def test_secrets_of_an_error_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tier = guard(RaisingTier({"error": ValueError("redis://user:hunter2@host")}))
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            tier.get(NAME, buffer())
        tier.close()
    assert "custom is left out for a while: ValueError" in caplog.text and "did not close: ValueError" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_late_operation_is_left_alone_and_holds_its_place() -> None:
    inner = WaitingTier({"objects": {NAME: b"0123456789abcdef"}})
    tier = guard(inner, seconds=0.01, places=2)
    buffers = [buffer(), buffer()]
    for into in buffers:
        with pytest.raises(AbandonedError):
            tier.get(NAME, into)
    assert tier.get(NAME, buffer()) is None  # no place
    assert not tier.put(NAME, buffer())
    assert counts(tier) == {"errors": 2, "rejected": 2}
    inner.go.set()
    wait_until(
        lambda: all(bytes(each) == b"0123456789abcdef" for each in buffers)
    )  # that is why they are not used again
    tier._timeout_seconds = 300.0
    wait_until(lambda: tier.get(NAME, buffer()) == 16)
    tier.close()


def test_threads_are_used_again() -> None:
    tier = guard(DictTier({"objects": {}}))
    for _ in range(50):
        tier.get(NAME, buffer())
    assert tier._num_threads == 1
    threads = [each for each in threading.enumerate() if each.name == "inflight-custom"]
    tier.close()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_close_ends_waits() -> None:
    inner = WaitingTier({"objects": {}})
    tier = guard(inner)
    ended: list[str] = []

    def call() -> None:
        with pytest.raises(AbandonedError):
            tier.put(NAME, buffer())
        ended.append("put")

    thread = threading.Thread(target=call)
    thread.start()
    assert inner.entered.acquire(timeout=300)
    tier.close()
    thread.join(300)
    assert ended == ["put"]
    assert tier.get(NAME, buffer()) is None
    assert counts(tier)["rejected"] == 1
    inner.go.set()


@pytest.mark.parametrize("answer", [True, "16", 2.0, -5, [], 10**30])
def test_whatever_is_returned_is_a_number(answer: Any) -> None:
    tier = guard(LyingTier({"garbage": b"x", "answer": answer}))
    found = tier.get(NAME, buffer())
    assert found == (answer if type(answer) is int else -1)
    assert counts(tier).get("read_bytes", 0) in (0, 16)
    tier.close()


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tier = guard(DictTier({"objects": {}}))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not tier.put(NAME, buffer()) and tier.get(NAME, buffer()) is None
    assert counts(tier) == {"rejected": 2}
    assert tier.put(NAME, buffer())
    tier.close()
