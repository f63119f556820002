"""The progress of a prompt: told from the engine's views, until the first token, and only if it was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from inflight.interface.engine_view import COLUMNS, EngineView, Watch
from inflight.interface.request import FinishReason
from tests.unit.entrypoints.api_client import serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def view(request_id: str, **values: int) -> EngineView:
    row = np.array([[values.get(name, 0) for name in COLUMNS]], dtype=np.int32)
    return EngineView(step_id=1, num_ranks=1, request_ids=(request_id,), requests=row)


def progress_of(events: list[Any]) -> list[tuple[int, int, int]]:
    found = [event["prompt_progress"] for event in events if isinstance(event, dict) and "prompt_progress" in event]
    assert all(each["time_ms"] >= 0 for each in found)
    return [(each["total"], each["cache"], each["processed"]) for each in found]


def test_progress_is_told_until_the_first_token() -> None:
    with serving() as api:
        api.core.held = True
        live = api.open("/v1/chat/completions", {**CHAT, "return_progress": True})
        live.until(lambda: progress_of(live.answer.events))
        (sequence,) = api.core.sequences
        total = len(api.core.prompts[0])
        for number, computed in ((2, 4), (2, 4), (3, 8)):
            api.core.take_view(view(sequence.request_id, cached=2, computed=computed))
            live.until(lambda number=number: len(progress_of(live.answer.events)) == number)
        api.core.take_view(view("another", computed=9))
        api.core.emit(0, "Hi", FinishReason.STOP)
        answer = live.end()
        told = progress_of(answer.events)
        assert told == [(total, 0, 0), (total, 2, 4), (total, 2, 8)]
        assert api.core.sent[-1] == Watch(is_wanted=False)


def test_without_the_field_nobody_watches() -> None:
    with serving() as api:
        answer = api.post("/v1/chat/completions", CHAT)
        assert progress_of(answer.events) == [] and not any(isinstance(each, Watch) for each in api.core.sent)
