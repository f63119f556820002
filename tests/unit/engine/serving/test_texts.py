"""`Texts`: no short text waits for a long one, and what waits is bounded."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.serving.texts import LONG_TEXT, MAX_WAITING_CHARACTERS, NUM_TEXT_THREADS, Texts
from inflight.errors import OverloadedError


class SlowInputProcessor(SimpleNamespace):
    """Long texts take until they are let go."""

    tokenizer = chat_template = default_params = default_max_tokens = None

    def __init__(self) -> None:
        super().__init__(is_free=threading.Event())

    def encode(self, text: str, **_: Any) -> list[int]:
        if len(text) > 10:
            assert self.is_free.wait(300)
        return [len(text)]


def test_a_short_text_waits_for_no_long_one() -> None:
    async def test() -> None:
        slow = SlowInputProcessor()
        front_end = Texts(cast("InputProcessor", slow), seed=0)
        try:
            long = [asyncio.create_task(front_end.encode("x" * (LONG_TEXT + 1))) for _ in range(NUM_TEXT_THREADS + 1)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(front_end.encode("short"), 100) == [5]
            slow.is_free.set()
            assert await asyncio.gather(*long) == [[LONG_TEXT + 1]] * len(long)
        finally:
            slow.is_free.set()
            front_end._close_texts()

    asyncio.run(test())


@pytest.mark.parametrize("length", [LONG_TEXT, MAX_WAITING_CHARACTERS])
def test_what_waits_for_its_tokens_is_bounded(length: int) -> None:
    async def test() -> None:
        slow = SlowInputProcessor()
        front_end = Texts(cast("InputProcessor", slow), seed=0)
        try:
            taken = [
                asyncio.create_task(front_end.encode("x" * length)) for _ in range(MAX_WAITING_CHARACTERS // length)
            ]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="wait to be tokenised") as caught:
                await front_end.encode("x" * length)
            assert caught.value.retry_after_seconds >= 1
            slow.is_free.set()
            await asyncio.gather(*taken)
            assert await front_end.encode("x" * length) == [length]
            assert await front_end.encode("x" * (MAX_WAITING_CHARACTERS + 1)), "one is always taken"
        finally:
            slow.is_free.set()
            front_end._close_texts()

    asyncio.run(test())
