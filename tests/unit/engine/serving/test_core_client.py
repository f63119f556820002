"""`CoreClient`: what the stream to a process of the engine tells who uses it. test_engine_client.py has the rest."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from inflight.engine.serving.core_client import CoreClient
from inflight.interface.serving import CachedBlocks, EngineDied, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus
from inflight.processes.streams import BlockingStream
from tests.unit.engine.serving.event_loop import run, until


class Listener:
    """Attributes: `told`: what came, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def take_outputs(self, message: EngineOutputs) -> None:
        self.told.append(message)

    def take_faults(self, status: FaultStatus) -> None:
        self.told.append(status)

    def take_cached(self, message: CachedBlocks) -> None:
        self.told.append(message)

    def core_ended(self, client: CoreClient, reason: str) -> None:
        self.told.append((client, reason))


def test_the_listener_gets_all_messages_in_order_and_the_end() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        listener = Listener()
        client = CoreClient(listener)
        await client.connect(ours)
        engine = BlockingStream(theirs)
        engine.send(EngineReady(front_end=1, num_kv_cache_tokens=10))
        messages = [
            EngineOutputs(outputs=(), num_received=1, stats=None),
            FaultStatus(last_cause="rank 1"),
            EngineOutputs(outputs=(), num_received=2, stats=None),
        ]
        for message in messages:
            engine.send(message)
        await until(lambda: len(listener.told) == len(messages))
        assert client.ready.done()
        engine.close()
        await asyncio.wait_for(client.closed, 300)
        assert listener.told == [*messages, (client, "the engine's process is gone")]

    run(test)


def test_the_news_that_the_engine_has_died_is_the_end_though_its_process_still_runs() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        listener = Listener()
        client = CoreClient(listener)
        await client.connect(ours)
        engine = BlockingStream(theirs)
        engine.send(EngineDied(reason="rank 0 is lost"))
        await asyncio.wait_for(client.closed, 300)
        assert listener.told == [(client, "the engine has failed: rank 0 is lost")]
        engine.close()

    run(test)
