"""From a prompt to processed images: once for equal images at the same time, and from the cache later."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from inflight.errors import EngineClosedError, EngineError, InvalidRequestError
from inflight.multimodal import images as module
from inflight.multimodal.fetch import WebUrl
from inflight.multimodal.images import Images
from inflight.multimodal.messages import Start, Task
from inflight.multimodal.processed import ProcessedImage, ProcessedInput
from inflight.multimodal.settings import ImageSettings
from inflight.multimodal.source import ImageContent
from tests.support.image_models import drawing, file_of, write_image_model

SETTINGS = ImageSettings(max_images=20, cache_bytes=10**7)
SCOPE = ("", "")
START = Start(folder=Path("/nowhere"), tokenizer=Path("/nowhere"))
T = TypeVar("T")


class Processors:
    """Keeps tasks until the test settles them."""

    def __init__(self, *_: object) -> None:
        self.tasks: list[tuple[Task, Future[ProcessedImage]]] = []
        self.clients: list[str] = []
        self.settles = True
        self.is_closed = False

    def submit(self, task: Task, client: str) -> Future[ProcessedImage]:
        self.clients.append(client)
        result = Future[ProcessedImage]()
        self.tasks.append((task, result))
        if self.settles:
            self.settle(-1)
        return result

    def share(self, result: Future[ProcessedImage], client: str) -> None:
        self.clients.append(client)

    def settle(self, index: int) -> None:
        task, result = self.tasks[index]
        assert result.set_running_or_notify_cancel()
        if bytes(task.content) == b"bad":
            result.set_exception(InvalidRequestError("it is bad"))
        elif bytes(task.content) == b"broken":
            result.set_exception(EngineError("the processor is broken"))
        else:
            pixels = np.full((1, 4), len(self.tasks), dtype=np.float32)
            part = ProcessedInput(pixels=pixels, grid=(1, 1, 1), num_tokens=1, digest=bytes(task.content).ljust(32))
            result.set_result(ProcessedImage(placeholder="<image>", expansion="<image>", inputs=(part,)))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[Images]:
    monkeypatch.setattr(module, "Processors", Processors)
    made = Images(SETTINGS, START)
    yield made
    made.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 300))


def prompt_of(*given: object, uuids: object = None, **options: object) -> dict[str, object]:
    data: dict[str, object] = {"image": list(given)}
    return {"prompt": "", "multi_modal_data": data, "multi_modal_uuids": uuids, "mm_processor_kwargs": options}


def tasks_of(images: Images) -> list[tuple[Task, Future[ProcessedImage]]]:
    processors = images._processors
    assert isinstance(processors, Processors)
    return processors.tasks


def digests(prepared: tuple[ProcessedImage, ...]) -> list[bytes]:
    return [image.inputs[0].digest.strip() for image in prepared]


def test_images_stay_in_their_order_and_equal_ones_are_processed_once(images: Images) -> None:
    encoded = base64.b64encode(b"a").decode()
    prepared = run(images.prepare(prompt_of(b"a", b"b", f"data:;base64,{encoded}"), SCOPE))
    assert digests(prepared) == [b"a", b"b", b"a"]
    again = run(images.prepare(prompt_of(b"b", b"a"), SCOPE))
    assert digests(again) == [b"b", b"a"]
    assert sorted(bytes(task.content) for task, _ in tasks_of(images)) == [b"a", b"b"]


def test_other_options_are_another_image(images: Images) -> None:
    for options in ({}, {"max_pixels": 5}, {"max_pixels": 6}, {"max_pixels": 5}):
        run(images.prepare(prompt_of(b"a", **options), SCOPE))
    assert [task.options for task, _ in tasks_of(images)] == [{}, {"max_pixels": 5}, {"max_pixels": 6}]


def test_a_file_and_pixels_with_the_same_bytes_are_different_images(images: Images) -> None:
    pixels = np.zeros((2, 2, 3), dtype=np.uint8)
    for given in (bytes(12), pixels, pixels.reshape(4, 1, 3), pixels.reshape(4, 3)):
        run(images.prepare(prompt_of(given), SCOPE))
    assert len(tasks_of(images)) == 4


def test_many_clients_with_the_same_image_wait_for_one_processing(images: Images) -> None:
    images._processors.settles = False  # type: ignore[attr-defined]

    async def ask() -> list[tuple[ProcessedImage, ...]]:
        asking = [asyncio.ensure_future(images.prepare(prompt_of(b"a"), SCOPE, f"client {i}")) for i in range(16)]
        while not (waiting := list(images._running.values())) or waiting[0].num_waiting < 16:
            await asyncio.sleep(0.001)
        images._processors.settle(0)  # type: ignore[attr-defined]
        return await asyncio.gather(*asking)

    found = run(ask())
    assert sorted(images._processors.clients) == sorted(f"client {i}" for i in range(16))  # type: ignore[attr-defined]
    assert len({id(each[0].inputs) for each in found}) == 1
    assert len(tasks_of(images)) == 1
    assert not images._running


def test_an_image_that_nobody_waits_for_is_not_processed(images: Images) -> None:
    images._processors.settles = False  # type: ignore[attr-defined]

    async def leave() -> None:
        asking = [asyncio.ensure_future(images.prepare(prompt_of(b"a"), SCOPE)) for _ in range(2)]
        while not (waiting := list(images._running.values())) or waiting[0].num_waiting < 2:
            await asyncio.sleep(0.001)
        asking[0].cancel()
        await asyncio.wait([asking[0]])
        assert not tasks_of(images)[0][1].cancelled()
        asking[1].cancel()
        await asyncio.wait([asking[1]])

    run(leave())
    assert tasks_of(images)[0][1].cancelled()
    assert not images._running


@pytest.mark.parametrize("content", [b"bad", b"broken"])
def test_an_error_names_the_image_and_is_not_cached(content: bytes, images: Images) -> None:
    for place in (1, 0):
        given = [b"good", b"good"]
        given[place] = content
        with pytest.raises((InvalidRequestError, EngineError)) as error:
            run(images.prepare(prompt_of(*given), SCOPE))
        if content == b"bad":
            assert isinstance(error.value, InvalidRequestError)
            assert error.value.param == f"multi_modal_data['image'][{place}]"
    assert [bytes(task.content) for task, _ in tasks_of(images)].count(content) == 2


def test_a_uuid_stands_for_an_image_that_was_sent_before(images: Images) -> None:
    run(images.prepare(prompt_of(b"a", b"b", uuids={"image": ["x", "y"]}), ("", "salt")))
    prepared = run(images.prepare(prompt_of(None, b"c", None, uuids={"image": ["y", None, "x"]}), ("", "salt")))
    assert digests(prepared) == [b"b", b"c", b"a"]


@pytest.mark.parametrize(
    ("salt", "options"), [("other", {}), ("salt", {"max_pixels": 5})], ids=["another salt", "other options"]
)
def test_an_unknown_uuid_is_refused(salt: str, options: dict[str, object], images: Images) -> None:
    run(images.prepare(prompt_of(b"a", uuids={"image": ["x"]}), ("", "salt")))
    with pytest.raises(InvalidRequestError) as error:
        run(images.prepare(prompt_of(b"b", None, uuids={"image": [None, "x"]}, **options), ("", salt)))
    assert error.value.param == "multi_modal_uuids['image'][1]"


def test_a_caller_without_an_event_loop_can_wait(images: Images) -> None:
    async def inside() -> tuple[ProcessedImage, ...]:  # a notebook has a running loop in its only thread
        return images.prepare_now(prompt_of(b"a"), SCOPE)

    assert digests(images.prepare_now(prompt_of(b"a"), SCOPE)) == digests(run(inside())) == [b"a"]


def test_a_slow_resolver_of_names_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Future[None]()

    def read(*_: object) -> None:
        ended.result(300)

    monkeypatch.setattr(module, "read_source", read)
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.0)
    settings = ImageSettings(max_images=1, cache_bytes=0, domains=frozenset({"a.example"}), fetch_seconds=0.2)
    slow = Images(settings, START)

    async def ask() -> None:
        try:
            await slow.prepare(prompt_of("https://a.example/a.png"), SCOPE)
        finally:
            ended.set_result(None)

    with pytest.raises(InvalidRequestError, match="within") as error:
        run(ask())
    assert error.value.param == "multi_modal_data['image'][0]"
    slow.close()


def test_the_time_until_a_thread_is_free_is_not_time_of_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = {f"/{i}": Future[None]() for i in range(module.NUM_FETCHES + 1)}
    begun: list[str] = []

    def read(source: WebUrl, settings: ImageSettings) -> ImageContent:
        begun.append(source.target)
        gates[source.target].result(300)
        return ImageContent(np.zeros(1, dtype=np.uint8))

    monkeypatch.setattr(module, "Processors", Processors)
    monkeypatch.setattr(module, "read_source", read)
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.0)
    settings = ImageSettings(max_images=9, cache_bytes=0, domains=frozenset({"a.example"}), fetch_seconds=0.2)
    images = Images(settings, START)

    async def ask() -> None:
        *slow, other = [
            asyncio.ensure_future(images.prepare(prompt_of(f"https://a.example{target}"), SCOPE)) for target in gates
        ]
        for each in slow:  # all threads are busy for longer than an image may take
            with pytest.raises(InvalidRequestError, match="within"):
                await each
        assert len(begun) == module.NUM_FETCHES and not other.done()
        monkeypatch.setattr(module, "_GRACE_SECONDS", 300.0)
        for gate in gates.values():
            gate.set_result(None)
        await other

    run(ask())
    images.close()


def test_missing_packages_are_named(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "PIL" else object())
    with pytest.raises(InvalidRequestError, match=r"inflight-llm\[images\]"):
        run(images.prepare(prompt_of(b"a"), SCOPE))


def test_after_close_nothing_is_prepared(images: Images) -> None:
    images.close()
    with pytest.raises(EngineClosedError):
        run(images.prepare(prompt_of(b"a"), SCOPE))
    assert images._processors.is_closed  # type: ignore[attr-defined]


def test_real_processes(tmp_path: Path) -> None:
    """The whole way, with an image of each form, and one that is wrong."""
    write_image_model(tmp_path, "smolvlm")
    images = Images(SETTINGS, Start(folder=tmp_path, tokenizer=tmp_path))
    drawn = drawing(50, 40)
    (tmp_path / "a.png").write_bytes(file_of(drawn))
    url = "data:image/png;base64," + base64.b64encode(file_of(drawn)).decode()
    prepared = images.prepare_now(prompt_of(drawn, np.asarray(drawn), tmp_path / "a.png", url), SCOPE)
    assert len({each.inputs[-1].digest for each in prepared}) == 1
    with pytest.raises(InvalidRequestError) as error:
        images.prepare_now(prompt_of(drawn, b"no image"), SCOPE)
    assert error.value.param == "multi_modal_data['image'][1]"
    with pytest.raises(InvalidRequestError) as error:
        images.prepare_now(prompt_of(drawn, unknown=1), SCOPE)
    assert error.value.param == "mm_processor_kwargs"
    images.close()
