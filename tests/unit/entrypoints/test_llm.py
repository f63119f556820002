"""A call of `LLM` in its own thread: its interrupt. tests/e2e/test_llm.py has the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, cast

import pytest

from inflight.entrypoints.llm import OfflineEngine, _Call


class Engine:
    """An interrupt comes while request number `last` is added, or, with -1, in the first step."""

    def __init__(self, last: int) -> None:
        self.last, self.num_steps = last, 0
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.call: _Call

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        self.added.append(request_id)
        self.call.is_interrupted = len(self.added) == self.last + 1

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.call.is_interrupted = True
        return []

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize(("last", "num_added", "num_steps"), [(0, 1, 0), (1, 2, 0), (-1, 4, 1)])
def test_an_interrupt_is_noticed_after_each_request_and_each_step(last: int, num_added: int, num_steps: int) -> None:
    """To prepare a long list of prompts may take a minute."""
    engine = Engine(last)
    engine.call = call = _Call(
        cast(OfflineEngine, engine), threading.Lock(), [(name, name, None, {}) for name in "abcd"]
    )
    call.run()
    assert isinstance(call.outputs.exception(0), KeyboardInterrupt)
    assert (len(engine.added), engine.num_steps, engine.aborted) == (num_added, num_steps, list("abcd"))
    assert call.progress.get_nowait() == 0
