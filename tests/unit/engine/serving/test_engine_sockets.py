"""`EngineSockets.get`: who tells why a process of the engine could not start."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial

import pytest

from inflight.engine.serving import engine_sockets
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.errors import EngineDeadError


def told_of(happens: Callable[[EngineSockets], object], seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told about a process that could not start, if `happens` comes after it."""
    monkeypatch.setattr(engine_sockets, "GIVE_UP_SECONDS", seconds)
    told: list[str] = []

    async def test() -> None:
        sockets = EngineSockets()
        happens(sockets)
        with contextlib.suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(0.05):
                (await sockets.get(partial(told.append, "why"))).close()

    asyncio.run(test())
    return told


def test_why_a_process_could_not_start_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = EngineDeadError("given up")
    assert told_of(lambda sockets: sockets.fail(given_up), 60.0, monkeypatch) == [], "the caller tells it"
    assert told_of(lambda sockets: sockets.put(socket.socket()), 60.0, monkeypatch) == ["why"]
    assert told_of(lambda sockets: None, 60.0, monkeypatch) == ["why"], "the waiting was cancelled"
    assert told_of(lambda sockets: None, 0.0, monkeypatch) == ["why"], "nothing is known for a long time"
