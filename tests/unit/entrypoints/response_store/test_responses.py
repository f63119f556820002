"""A file that cannot be used: one line in the log, and an error that says so."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.response_store import responses as stored_responses
from inflight.entrypoints.response_store.responses import StoredResponses, StoreFailedError
from inflight.entrypoints.response_store.store import NewResponse, ResponseStore
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


def test_a_failure_is_told_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    responses = StoredResponses(settings(tmp_path))

    def fail(store: ResponseStore) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    async def run(*works: Callable[[ResponseStore], int]) -> list[int | BaseException | None]:
        return [*await asyncio.gather(*(responses.call(work) for work in works), return_exceptions=True)]

    # on a full disk each second call may succeed, because it only reads
    found = asyncio.run(run(fail, lambda _: 1, fail, lambda _: 2, fail))
    assert [each if isinstance(each, int) else type(each) for each in found] == [
        StoreFailedError, 1, StoreFailedError, 2, StoreFailedError,
    ]  # fmt: skip
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "disk is full" in caplog.text


@pytest.mark.parametrize("replaces", [False, True])
def test_a_file_that_is_removed_or_replaced_is_not_written_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replaces: bool
) -> None:
    """Otherwise each process of the server would go on with a file of its own."""
    path = tmp_path / "r.sqlite"
    responses, other = StoredResponses(settings(tmp_path)), StoredResponses(settings(tmp_path))

    def add(store: ResponseStore) -> bool:
        return store.add(
            NewResponse(owner="", id="r", previous=None, model="m", status="completed", body=b"{}", input=())
        )

    def has(store: ResponseStore) -> bool:
        return store.find("", "r") is not None

    assert asyncio.run(responses.call(add)) and asyncio.run(other.call(has))
    path.unlink()
    if replaces:
        ResponseStore(path).close()
    assert not asyncio.run(responses.call(has)) and not asyncio.run(other.call(has))
    assert asyncio.run(responses.call(add)) and asyncio.run(other.call(has))
    assert caplog.text.count("removed or replaced") == 2


def test_calls_that_wait_for_another_process_wait_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "WAIT_SECONDS", 1.5)
    responses = StoredResponses(settings(tmp_path))
    waits: list[float] = []

    def look(store: ResponseStore) -> None:
        (milliseconds,) = store._do("PRAGMA busy_timeout").fetchone()
        waits.append(milliseconds / 1000)
        time.sleep(1.0)

    async def run() -> None:
        await asyncio.gather(*(responses.call(look) for _ in range(3)))

    asyncio.run(run())
    assert waits[0] > 0.5 >= waits[1] >= waits[2] == 0.1


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = settings(tmp_path / "none")
    with pytest.raises(StoreFailedError):
        asyncio.run(StoredResponses(given).call(lambda _: 1))
    assert "cannot be stored" in caplog.text


def test_none_stores_nothing(tmp_path: Path) -> None:
    responses = StoredResponses(ServerSettings(response_store="none"))
    assert not responses.is_on
    assert asyncio.run(responses.call(lambda _: 1)) is None
