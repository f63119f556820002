"""`TextLanes`: texts wait for no longer ones, clients get equal shares, and who fills a lane is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from inflight.engine.serving import text_lanes
from inflight.engine.serving.client import CLIENT
from inflight.engine.serving.text_lanes import BEHIND_COST, LANES, MAX_WAITING_CHARACTERS, TEXT_COST, Lane, TextLanes
from inflight.errors import EngineClosedError, OverloadedError
from inflight.tokenizer.sandbox.budget import TemplateBudget
from tests.unit.engine.serving.event_loop import run, until


@contextmanager
def client(name: str) -> Iterator[None]:
    """Texts that are sent in this context are those of this client."""
    token = CLIENT.set(name)
    try:
        yield
    finally:
        CLIENT.reset(token)


class Slow:
    """Texts that are not tokenised before they are let go. `order`: of those that are let go."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.is_free = threading.Event()

    def text(self, name: str) -> Callable[[], str]:
        def tokenise() -> str:
            assert self.is_free.wait(300)
            self.order.append(name)
            return name

        return tokenise


def render_for_ever() -> None:
    """As a chat template that never ends."""
    budget = TemplateBudget(2**62, seconds=300.0)
    while True:
        budget.spend(2**16)


async def start_rendering(lane: Lane) -> asyncio.Task[None]:
    rendering = asyncio.create_task(lane.run(render_for_ever, 0))
    await until(lambda: not lane._num_free)
    return rendering


def test_a_rendering_ends_when_its_client_has_left() -> None:
    async def test() -> None:
        lane = Lane("lane", 1)
        (await start_rendering(lane)).cancel()
        assert await lane.run(lambda: "the next one", 0) == "the next one"
        lane.close()

    run(test)


def test_a_text_does_not_wait_for_renderings() -> None:
    async def test() -> None:
        lanes = TextLanes()
        renderings = [asyncio.create_task(lanes.render(render_for_ever)) for _ in range(9)]
        await until(lambda: not lanes._renderings._num_free)
        assert await lanes.run(lambda: "a text", 6) == "a text"
        for rendering in renderings:
            rendering.cancel()
        lanes.close()
        with pytest.raises(EngineClosedError):
            await lanes.render(render_for_ever)

    run(test)


def test_a_rendering_ends_when_the_engine_is_closed() -> None:
    async def test() -> None:
        lane = Lane("lane", 1)
        rendering = await start_rendering(lane)
        lane.close()
        with pytest.raises(EngineClosedError):
            await rendering
        await asyncio.to_thread(lane._threads.shutdown)  # it waits for the thread
        assert not any(thread.name.startswith("lane_") for thread in threading.enumerate())

    run(test)


class Sent:
    """Sends texts to a lane. Their tasks begin at once, in order."""

    def __init__(self, lane: Lane, slow: Slow) -> None:
        self.lane, self.slow = lane, slow
        self.tasks: list[asyncio.Task[str]] = []

    async def send(self, name: str, length: int, *, by: str, behind: bool = False) -> asyncio.Task[str]:
        with client(by):
            task = asyncio.create_task(self.lane.run(self.slow.text(name), length, behind=behind))
        await asyncio.sleep(0)
        self.tasks.append(task)
        return task

    async def let_go(self) -> list[str]:
        self.slow.is_free.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.slow.order


@asynccontextmanager
async def blocked() -> AsyncIterator[Sent]:
    """A lane with one thread, which is busy with a text of the client "first"."""
    lane, slow = Lane("a-lane", 1), Slow()
    sent = Sent(lane, slow)
    try:
        await sent.send("first", 1, by="first")
        yield sent
    finally:
        slow.is_free.set()
        lane.close()


def in_order(send: Callable[[Sent], Awaitable[None]]) -> list[str]:
    """The order in which a blocked lane tokenises what `send` sends."""
    order: list[str] = []

    async def test() -> None:
        async with blocked() as sent:
            await send(sent)
            order.extend(await sent.let_go())

    run(test)
    assert order[0] == "first"
    return order[1:]


@pytest.mark.parametrize("number", range(1, len(LANES)))
def test_texts_wait_for_no_longer_ones(number: int) -> None:
    async def test() -> None:
        slow, lanes = Slow(), TextLanes()
        try:
            shorter = LANES[number - 1][0]
            assert shorter is not None
            long = [asyncio.create_task(lanes.run(slow.text("long"), shorter + 1)) for _ in range(10)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(lanes.run(lambda: "short", shorter), 300) == "short"
            slow.is_free.set()
            assert await asyncio.gather(*long) == ["long"] * 10
        finally:
            slow.is_free.set()
            lanes.close()

    run(test)


def test_clients_get_equal_shares() -> None:
    async def send(sent: Sent) -> None:
        for i in range(3):
            await sent.send(f"a{i}", 5000, by="a")
        await sent.send("b0", 5000, by="b")
        for i in range(2):
            await sent.send(f"c{i}", 4000, by="c")

    # c's texts are shorter: its first is due before those of a and b, and its second before a's second
    assert in_order(send) == ["c0", "a0", "b0", "c1", "a1", "a2"]


def test_a_client_is_not_punished_for_what_it_sent_while_nobody_waited() -> None:
    async def test() -> None:
        async with blocked() as sent:
            await sent.send("a0", 50_000, by="a")
            await sent.let_go()
            sent.slow.is_free.clear()
            await sent.send("first again", 1, by="first")
            await sent.send("b", 2000, by="b")
            await sent.send("a1", 1000, by="a")
            assert (await sent.let_go())[2:] == ["first again", "a1", "b"]

    run(test)


def test_a_long_text_comes_although_shorter_ones_of_new_clients_do_not_end() -> None:
    async def send(sent: Sent) -> None:
        await sent.send("long", 10 * TEXT_COST, by="a")
        for i in range(30):
            await sent.send(f"short {i}", 1, by="b")

    assert in_order(send).index("long") in range(8, 13)


def test_a_new_client_with_a_shorter_text_is_behind_no_crowd() -> None:
    async def send(sent: Sent) -> None:
        for i in range(20):
            await sent.send(f"long {i}", 50_000, by=f"a{i}")
        await sent.send("short", 5000, by="b")

    assert in_order(send)[0] == "short"

    async def test() -> None:
        async with blocked() as sent:
            for i in range(20):
                await sent.send(f"long {i}", 50_000, by=f"a{i}")
            gate = threading.Event()
            first, second = asyncio.Event(), asyncio.get_running_loop()

            def open_gate() -> str:
                second.call_soon_threadsafe(first.set)
                assert gate.wait(300)
                return "gate"

            with client("c"):
                opened = asyncio.create_task(sent.lane.run(open_gate, 1))
            await asyncio.sleep(0)
            sent.slow.is_free.set()
            await first.wait()  # the crowd's texts come behind this one, and one of them may have been done
            await sent.send("short", 5000, by="b")
            gate.set()
            order = await sent.let_go()
            await opened
            assert order.index("short") <= 2

    run(test)


def test_what_no_request_needs_waits_for_requests_but_not_for_ever() -> None:
    num_later = BEHIND_COST // 2**16

    async def send(sent: Sent) -> None:
        await sent.send("tokenize", 10, by="a", behind=True)
        for i in range(2 * num_later):
            await sent.send(f"request {i}", 2**16, by="b")

    assert in_order(send).index("tokenize") in range(num_later - 3, num_later + 3)


@pytest.fixture
def refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lanes, "REFUSAL_SECONDS", 0.0)


@pytest.mark.usefixtures("refuses_at_once")
def test_the_client_that_fills_a_lane_is_refused() -> None:
    quarter = MAX_WAITING_CHARACTERS // 4

    async def test() -> None:
        async with blocked() as sent:
            much = [await sent.send(f"a{i}", quarter, by="a") for i in range(4)]
            await sent.send("small", 0, by="c")
            with pytest.raises(OverloadedError, match="tokenised") as caught:  # the lane is full of its texts
                await (await sent.send("a4", quarter, by="a"))
            assert caught.value.retry_after_seconds >= 1
            b = await sent.send("b", quarter, by="b")
            with pytest.raises(OverloadedError):
                await much[-1]
            as_much_as_a = await sent.send("as much", 3 * quarter, by="d")
            with pytest.raises(OverloadedError):
                await as_much_as_a
            assert sorted(await sent.let_go()) == ["a0", "a1", "a2", "b", "first", "small"]
            assert b.result() == "b"

    run(test)


@pytest.mark.usefixtures("refuses_at_once")
def test_a_text_of_any_length_is_taken_if_none_waits() -> None:
    async def test() -> None:
        async with blocked() as sent:
            await sent.send("huge", MAX_WAITING_CHARACTERS + 1, by="a")
            await sent.send("refused", 1, by="a")
            assert await sent.let_go() == ["first", "huge"]

    run(test)


def test_a_caller_that_leaves_takes_its_text_with_it() -> None:
    async def test() -> None:
        async with blocked() as sent:
            left = await sent.send("left", MAX_WAITING_CHARACTERS, by="a")
            left.cancel()
            await until(left.done)
            await sent.send("next", MAX_WAITING_CHARACTERS, by="a")
            sent.tasks[0].cancel()  # its text has the thread already, and its lane waits for it
            assert await sent.let_go() == ["first", "next"]

    run(test)


def test_an_error_reaches_its_caller_alone() -> None:
    async def test() -> None:
        lanes = TextLanes()
        try:
            bad, good = asyncio.create_task(lanes.run(lambda: 1 // 0)), asyncio.create_task(lanes.run(lambda: "good"))
            assert await good == "good"
            with pytest.raises(ZeroDivisionError):
                await bad
        finally:
            lanes.close()

    run(test)


def test_the_end_refuses_texts_that_wait() -> None:
    async def test() -> None:
        async with blocked() as sent:
            waiting = await sent.send("waiting", 1, by="a")
            sent.lane.close()
            with pytest.raises(EngineClosedError):
                await waiting
            assert await sent.let_go() == ["first"]
        lanes = TextLanes()
        lanes.close()
        with pytest.raises(EngineClosedError):
            await lanes.run(lambda: "too late")

    run(test)


def test_a_refusal_comes_late() -> None:
    """A client that tries again at once would take as much time as its texts."""
    seconds = 0.0

    async def test() -> None:
        nonlocal seconds
        lane = Lane("a-lane", 1)
        slow = Slow()
        sent = Sent(lane, slow)
        try:
            for name in ("first", "second"):
                await sent.send(name, MAX_WAITING_CHARACTERS, by="a")
            begin = asyncio.get_running_loop().time()
            with pytest.raises(OverloadedError):
                await lane.run(slow.text("refused"), 1)
            seconds = asyncio.get_running_loop().time() - begin
        finally:
            slow.is_free.set()
            await asyncio.gather(*sent.tasks)
            lane.close()

    with client("a"):
        run(test)
    assert seconds >= text_lanes.REFUSAL_SECONDS
