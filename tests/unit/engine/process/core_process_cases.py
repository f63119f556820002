"""Engines in a process of their own, for tests which let them fail."""

from __future__ import annotations

import socket
from typing import Any

from inflight.engine.process.engine_keeper import EngineKeeper
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.interface.statistics import SchedulerStats

BROKEN = "tests.unit.engine.core.broken_executor:"
MORTAL = {"enable_fault_tolerance": False}  # the engine is not started again


def pid_of(engine: AsyncLLM) -> int:
    keeper = engine._keepers[0]
    assert isinstance(keeper, EngineKeeper) and keeper.process is not None
    return keeper.process.process.pid


def sockets(engine_socket: socket.socket) -> EngineSockets:
    """The sockets of a front end that gets only this one."""
    found = EngineSockets()
    found.put(engine_socket)
    return found


def stats(step_id: int, **changes: Any) -> SchedulerStats:
    return SchedulerStats(
        step_id=step_id, num_running=1, num_waiting=step_id, num_waiting_tokens=0, kv_cache_usage=0.0, **changes
    )
