"""Downloads for requests: one that hangs costs nothing but itself, and each error is an answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from inflight import LLM
from inflight.entrypoints.router import management
from inflight.entrypoints.router.management import Downloads, ManagementError, pull
from inflight.errors import EngineError, InflightError, ModelNotFoundError


async def no_end(task: asyncio.Future[Any], seconds: float | None) -> None:
    await asyncio.wait([task], timeout=seconds)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def answer(sent: list[Any]) -> list[Any]:
    body = b"".join(message.get("body", b"") for message in sent)
    return [json.loads(line) for line in body.splitlines()]


def test_downloads_that_hang() -> None:
    begun, go_on = list[str](), threading.Event()

    def download(name: str) -> None:
        begun.append(name)
        assert go_on.wait(60)

    async def test() -> None:
        downloads = Downloads(download)
        tasks = [downloads.begin(name) for name in ("a", "b", "c", "d")]
        assert downloads.begin("a") is tasks[0]
        with pytest.raises(ManagementError, match="4 models are being pulled") as refused:
            downloads.begin("e")
        assert refused.value.status == 503
        assert await asyncio.to_thread(lambda: "the pool has a free thread") is not None
        go_on.set()
        assert await asyncio.gather(*tasks) == [None] * 4 and sorted(begun) == ["a", "b", "c", "d"]
        assert await downloads.begin("a") is None

    run(test)


@pytest.mark.parametrize(
    ("raised", "status"), [(ManagementError("no such model", 404), 404), (RecursionError("of a library"), 500)]
)
@pytest.mark.parametrize("streams", [True, False])
def test_an_error_is_an_answer(raised: Exception, status: int, streams: bool) -> None:
    def download(name: str) -> None:
        raise raised

    async def test() -> None:
        with pytest.raises(ManagementError, match=str(raised)) as refused:
            await pull(Downloads(download).begin("a"), "a", ignore, no_end, streams=streams)
        assert refused.value.status == status

    async def ignore(message: Any) -> None: ...

    run(test)


def test_the_end_of_the_server_ends_the_answer() -> None:
    go_on = threading.Event()
    sent: list[Any] = []

    def download(name: str) -> None:
        assert go_on.wait(60)

    times = iter(range(10))

    async def wait(task: asyncio.Future[InflightError | None], seconds: float | None) -> None:
        if next(times) == 2:
            raise EngineError("the server is shutting down")

    async def send(message: Any) -> None:
        sent.append(message)

    async def test() -> None:
        task = Downloads(download).begin("a")
        await pull(task, "a", send, wait, streams=True)
        go_on.set()
        await task

    run(test)
    assert answer(sent)[-1] == {"error": "the server is shutting down"} and not sent[-1].get("more_body")


@pytest.mark.parametrize("name", ["x" * 2000 + "/y", "x" * 300 + "/y", "x/" + "y" * 300, "~nobody-of-this-name/x"])
def test_names_that_no_model_can_have(name: str) -> None:
    with pytest.raises(ManagementError) as refused:
        management._download(name)
    assert refused.value.status in (400, 404)


def test_an_answer_of_the_hub_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proxy before the hub answers with a page of its own, and the library expects JSON."""

    def answers(*args: Any, **more: Any) -> None:
        json.loads("<html>")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answers)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelNotFoundError, match=r"'org/name' could not be downloaded: the hub's answer.*JSONDecodeError"
    ):
        LLM("org/name")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".gguf", "~nobody-of-this-name/x", "a\0b"])
def test_names_that_no_file_can_have(name: str) -> None:
    for given in (
        {"model": name},
        {"tokenizer": name},
        {"speculative_config": {"method": "draft_model", "model": name}},
    ):
        with pytest.raises(ModelNotFoundError, match="there is no folder"):
            LLM(**given)
