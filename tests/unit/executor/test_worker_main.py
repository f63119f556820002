"""What a worker process does around its replies. Its start, its commands and its end: test_multiproc*.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from inflight.executor import worker_main
from inflight.interface.messages import WorkerActivity
from inflight.interface.start_up import Ready
from inflight.processes.streams import BlockingStream


def test_what_is_loaded_is_frozen_before_the_rank_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no garbage collection visits the model, which would delay a step."""
    calls: list[str] = []
    noted = {name: lambda name=name: calls.append(name) for name in ("collect", "freeze")}
    monkeypatch.setattr(worker_main, "gc", SimpleNamespace(**noted))
    stream = cast(BlockingStream, SimpleNamespace(send=lambda message: calls.append(type(message).__name__)))
    worker_main.send_reply(stream, WorkerActivity(rank=0, text="idle", is_waiting=False))
    worker_main.send_reply(stream, Ready(rank=0))
    assert calls == ["WorkerActivity", "collect", "freeze", "Ready"]
