"""Comments keep a stream alive that has nothing to say."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from inflight.entrypoints.http.sse import EventStream
from tests.support.virtual_time import VirtualTimeLoop


class Client:
    """Takes what is sent, unless it is paused."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def text(self) -> str:
        assert [message["type"] for message in self.messages].count("http.response.start") <= 1
        return b"".join(message.get("body", b"") for message in self.messages).decode()


def test_a_stream_that_waits_sends_comments_and_begins_with_one() -> None:
    async def test() -> None:
        client = Client()
        events = EventStream(client.send, keep_alive=0.02)
        async with events.kept_alive():
            assert not events.has_started, "an error can still have a status of its own"
            start = time.monotonic()
            while client.text.count(": keep-alive") < 2:
                await asyncio.sleep(0.005)
            assert events.has_started
            await events.send(b"data: 1\n\n")
            seconds = time.monotonic() - start + 0.02
        num_messages = len(client.messages)
        await asyncio.sleep(0.05)
        assert len(client.messages) == num_messages, "none comes after the end"
        await events.finish(b"data: [DONE]\n\n")
        assert 2 <= client.text.count(": keep-alive\n") <= seconds / 0.02 + 1
        assert client.text.replace(": keep-alive\n", "") == "data: 1\n\ndata: [DONE]\n\n"
        assert client.messages[-1] == {"type": "http.response.body", "body": b""}

    asyncio.run(test())


def test_a_busy_stream_and_one_without_an_interval_have_no_comments() -> None:
    async def test() -> None:
        for keep_alive in (0.3, None):
            client = Client()
            events = EventStream(client.send, keep_alive=keep_alive)
            async with events.kept_alive():
                for _ in range(5):
                    await asyncio.sleep(0.01)
                    await events.send(b"x")
            assert client.text == "xxxxx"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())


def test_a_client_that_takes_nothing_gets_no_comments() -> None:
    async def test() -> None:
        client = Client()
        events = EventStream(client.send, keep_alive=0.01)
        async with events.kept_alive():
            await events.send(b"a")
            client.reads.clear()
            sending = asyncio.create_task(events.send(b"b"))
            await asyncio.sleep(0.05)
            client.reads.set()
            await sending
            await events.finish(b"c")
        assert client.text.replace(": keep-alive\n", "") == "abc"
        assert client.text.count("keep-alive") <= 1

    asyncio.run(test())


def test_numbered_events_are_sent_in_their_order() -> None:
    """Also if one that keeps the stream alive waits for the client when the next one comes."""

    async def test() -> None:
        client = Client()
        numbers, is_made = itertools.count(), asyncio.Event()

        def event() -> bytes:
            is_made.set()
            return b"%d " % next(numbers)

        events = EventStream(client.send, keep_alive=0.01)
        async with events.kept_alive(event):
            await events.send(event())
            client.reads.clear()
            is_made.clear()
            await is_made.wait()
            client.reads.set()
            await events.send(event())
        found = [int(number) for number in client.text.split()]
        assert found == sorted(found)
        assert len(found) >= 3

    asyncio.run(test())


def test_several_tasks_begin_the_stream_once() -> None:
    """The choices of one answer are sent by tasks of their own."""

    async def test() -> None:
        client = Client()
        client.reads.clear()
        events = EventStream(client.send)
        sending = [asyncio.create_task(events.send(part)) for part in (b"a", b"b", b"c")]
        await asyncio.sleep(0)
        client.reads.set()
        await asyncio.gather(*sending)
        assert client.messages[0]["type"] == "http.response.start"
        assert sorted(client.text) == ["a", "b", "c"]

    asyncio.run(test())
