"""`CoreClient`: what the stream to a process of the engine tells who uses it. test_engine_client.py has the rest."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from inflight.engine.serving.core_client import PIECE_BYTES, CoreClient
from inflight.interface.codec import encode
from inflight.interface.engine_view import EngineView
from inflight.interface.serving import (
    AddRequest,
    CachedBlocks,
    EndDamagedEngine,
    EngineDied,
    EngineOutputs,
    EngineReady,
)
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

    def take_view(self, view: EngineView) -> None:
        self.told.append(view)

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


class Transport(asyncio.Transport):
    """Takes what it is given, and is full whenever it was given something, until `make_room`."""

    def __init__(self, client: CoreClient, *, fills: bool) -> None:
        super().__init__()
        self._client = client
        self._fills = fills
        self.taken: list[bytes] = []  # by call

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.taken.append(b"".join(list_of_data))
        if self._fills:
            self._client.pause_writing()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.mark.parametrize("fills", [False, True])
def test_a_large_message_goes_to_the_transport_in_pieces_and_in_order(fills: bool) -> None:
    async def test() -> None:
        client = CoreClient(Listener())
        transport = Transport(client, fills=fills)
        client.connection_made(transport)
        pixels = np.random.default_rng(0).integers(0, 2**31, 2**20, dtype=np.int32)
        messages = [AddRequest(prompt_token_ids=tokens, sequences=()) for tokens in (pixels[:3], pixels, pixels[:5])]
        expected = [b"".join(encode(message).buffers()) for message in messages]
        for message in messages:
            client.send(message)
        assert sum(map(len, transport.taken)) < 2 * PIECE_BYTES  # the rest is not given in the same callback
        while sum(map(len, transport.taken)) < sum(map(len, expected)):
            num_calls = len(transport.taken)
            if fills:
                client.resume_writing()
            else:
                await asyncio.sleep(0)
            assert len(transport.taken) == num_calls + 1
        assert b"".join(transport.taken) == b"".join(expected)
        assert max(map(len, transport.taken)) < 2 * PIECE_BYTES
        client.resume_writing()
        client.send(messages[0])
        assert transport.taken[-1] == expected[0]  # at once, because nothing waits

    run(test)


def test_what_waits_is_sent_before_the_news_of_a_damaged_message() -> None:
    async def test() -> None:
        client = CoreClient(Listener())
        transport = Transport(client, fills=True)
        client.connection_made(transport)
        large = AddRequest(prompt_token_ids=np.zeros(2**20, dtype=np.int32), sequences=())
        client.send(large)
        buffer = client.get_buffer(-1)
        buffer[:16] = bytes(16)
        client.buffer_updated(16)
        reason = client.reason.partition("message: ")[2]
        last = [large, EndDamagedEngine(reason=reason)]
        assert b"".join(transport.taken) == b"".join(b"".join(encode(each).buffers()) for each in last)

    run(test)
