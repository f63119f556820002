"""Templates that requests bring: what they may do, and that the rest goes on whatever they do."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inflight.entrypoints.serve import template_process
from inflight.entrypoints.serve.template_process import MAX_PROCESSES, TemplateProcesses
from inflight.errors import InvalidRequestError, OverloadedError, TokenizerError

ENDLESS = "{% for a in range(1000) %}" * 8 + "{% endfor %}" * 8
JOB: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
SIMPLE = "{{ bos_token }}{{ messages[0].content }}"


@contextlib.asynccontextmanager
async def processes(seconds: float = 5.0) -> AsyncIterator[TemplateProcesses]:
    made = TemplateProcesses(seconds)
    try:
        yield made
    finally:
        await made.close()


def test_a_template_is_rendered_and_errors_come_back() -> None:
    async def test() -> None:
        async with processes() as templates:
            assert await templates.render(SIMPLE, {"bos_token": "<s>"}, **JOB) == "<s>hi"
            with pytest.raises(TokenizerError, match=r"not valid, line 1"):
                await templates.render("{% if %}", {}, **JOB)
            with pytest.raises(InvalidRequestError, match="no system here"):
                await templates.render("{{ raise_exception('no system here') }}", {}, **JOB)
            with pytest.raises(InvalidRequestError, match="unsafe"):
                await templates.render("{{ ''.__class__.__mro__ }}", {}, **JOB)
            with pytest.raises((TokenizerError, InvalidRequestError), match=r"[Mm]emory"):
                await templates.render("{{ 'x' | center(4000000000) }}", {}, **JOB)
            assert await templates.render(SIMPLE, {"bos_token": ""}, **JOB) == "hi"

    asyncio.run(test())


def test_endless_templates_cost_their_own_requests_only() -> None:
    async def test() -> None:
        async with processes(0.5) as templates:
            start = time.monotonic()
            endless = [asyncio.create_task(templates.render(ENDLESS, {}, **JOB)) for _ in range(MAX_PROCESSES + 1)]
            honest = asyncio.create_task(templates.render(SIMPLE, {"bos_token": ""}, **JOB))
            longest = 0.0
            while not honest.done():  # the loop is free meanwhile
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)
            assert await honest == "hi"
            for task in endless:
                with pytest.raises(TokenizerError, match=r"longer than the 0.5 s"):
                    await task
            assert longest < 30
            assert time.monotonic() - start < 300

    asyncio.run(test())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes, as they are started."""
    found: list[Any] = []
    whole = template_process.ChildProcess

    def start(*args: Any) -> Any:
        found.append(whole(*args))
        return found[-1]

    monkeypatch.setattr(template_process, "ChildProcess", start)
    return found


def test_a_client_that_goes_ends_its_process(started: list[Any]) -> None:
    async def test() -> None:
        async with processes(60.0) as templates:
            task = asyncio.create_task(templates.render(ENDLESS, {}, **JOB))
            while not started:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not started[0].is_alive

    asyncio.run(test())


def test_a_process_that_was_killed_while_it_waited_costs_no_request(started: list[Any]) -> None:
    async def test() -> None:
        async with processes() as templates:
            assert await templates.render(SIMPLE, {"bos_token": ""}, **JOB) == "hi"
            started[0].send_signal(signal.SIGKILL)
            while started[0].is_alive:
                await asyncio.sleep(0.01)
            assert await templates.render(SIMPLE, {"bos_token": ""}, **JOB) == "hi"
            assert len(started) == 2

    asyncio.run(test())


def test_those_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_WAITING", 0)

    async def test() -> None:
        async with processes() as templates:
            with pytest.raises(OverloadedError, match="try again"):
                await templates.render(SIMPLE, {}, **JOB)

    asyncio.run(test())


def test_those_that_have_waited_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_WAITING", 1)

    async def test() -> None:
        async with processes() as templates:
            for _ in range(2):
                assert await templates.render(SIMPLE, {"bos_token": ""}, **JOB) == "hi"
            assert templates._num_waiting == 0

    asyncio.run(test())
