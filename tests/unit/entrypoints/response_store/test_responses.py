"""A file that cannot be used: one line in the log, and no error."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.response_store.store import ResponseStore
from inflight.entrypoints.serve.settings import ServerSettings


def settings(tmp_path: Path, **more: Any) -> ServerSettings:
    return ServerSettings(response_store=str(tmp_path / "r.sqlite"), **more)


def test_the_work_is_done_in_another_thread_with_the_bounds_of_the_settings(tmp_path: Path) -> None:
    responses = StoredResponses(settings(tmp_path, response_store_bytes=2**20, response_store_seconds=60.0))

    def look(store: ResponseStore) -> Any:
        return threading.get_ident(), store._max_bytes, store._max_seconds

    thread, max_bytes, max_seconds = asyncio.run(responses.call(look))  # type: ignore[misc, arg-type]
    assert thread != threading.get_ident()
    assert (max_bytes, max_seconds) == (2**20, 60.0)


def test_a_failure_is_told_once_until_it_works_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    responses = StoredResponses(settings(tmp_path))

    def fail(store: ResponseStore) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    async def run(*works: Callable[[ResponseStore], int]) -> list[int | None]:
        return [await responses.call(work) for work in works]

    assert asyncio.run(run(fail, fail, lambda _: 1, fail)) == [None, None, 1, None]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "disk is full" in caplog.text


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = settings(tmp_path / "none")
    assert asyncio.run(StoredResponses(given).call(lambda _: 1)) is None
    assert "cannot be stored" in caplog.text


def test_none_stores_nothing(tmp_path: Path) -> None:
    responses = StoredResponses(ServerSettings(response_store="none"))
    assert not responses.is_on
    assert asyncio.run(responses.call(lambda _: 1)) is None
