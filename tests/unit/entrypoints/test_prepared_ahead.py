"""Images of later prompts are processed while earlier ones are computed: their order, their number and their memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.entrypoints import prepared_ahead as module
from inflight.entrypoints.llm import _Call
from inflight.entrypoints.prepared_ahead import MAX_AHEAD, PreparedAhead
from inflight.errors import InvalidRequestError
from inflight.multimodal.processed import ProcessedImage, ProcessedInput

SOON = 300.0  # seconds that nothing here takes
PIXELS = np.zeros((1, 4), dtype=np.float32)


def processed(name: str) -> ProcessedImage:
    part = ProcessedInput(pixels=PIXELS, grid=(1, 1, 1), num_tokens=1, digest=bytes(32))
    return ProcessedImage(placeholder="@", expansion=name, inputs=(part,))


class Images:
    """Prepares a prompt when the test lets it, by the name of its image."""

    def __init__(self, *names: str) -> None:
        self.gates = {name: Future[None]() for name in names}
        self.begun: list[str] = []
        self.lock = threading.Lock()

    def prepared_now(self, prompt: Any, cache_salt: str) -> Any:
        [name] = prompt["multi_modal_data"]["image"]
        with self.lock:
            self.begun.append(name)
        self.gates[name].result(SOON)
        return {**prompt, "multi_modal_data": {"image": (processed(name),)}}


def request(name: str, image: object = "") -> Any:
    """`image`: None for one that was sent before; "" for one of the same name."""
    prompt: Any = {"prompt": name, "multi_modal_data": {"image": [name if image == "" else image]}}
    return name, prompt, None, {}


def text(name: str) -> Any:
    return name, name, None, {}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def taken(ahead: PreparedAhead, seconds: float = SOON) -> str:
    found = ahead.take(seconds)
    assert found is not None
    return found[0]


def test_some_prompts_are_prepared_ahead_and_come_in_their_order() -> None:
    names = [str(i) for i in range(20)]
    images = Images(*names)
    ahead = PreparedAhead(images, map(request, names))  # type: ignore[arg-type]
    assert ahead.take(0.0) is None
    wait_for(lambda: len(images.begun) == MAX_AHEAD)
    for name in names[1:]:
        images.gates[name].set_result(None)
    assert ahead.take(0.0) is None, "the first one is not ready"
    images.gates["0"].set_result(None)
    assert [taken(ahead) for _ in names] == names
    assert ahead.take(SOON) is None
    ahead.close()


def test_texts_come_at_once_and_only_when_they_are_asked_for() -> None:
    read: list[str] = []

    def requests() -> Iterator[Any]:
        for name in "abc":
            read.append(name)
            yield text(name)

    ahead = PreparedAhead(Images(), requests())  # type: ignore[arg-type]
    assert not read
    assert taken(ahead, 0.0) == "a"
    assert read == ["a"]
    assert [taken(ahead, 0.0) for _ in range(2)] == ["b", "c"]
    ahead.close()


def test_an_image_that_is_only_named_waits_for_the_prompts_before_it() -> None:
    images = Images("a", "b", "d")
    ahead = PreparedAhead(images, iter([request("a"), request("b", None), request("d")]))  # type: ignore[arg-type]
    assert ahead.take(0.0) is None
    wait_for(lambda: images.begun == ["a"])
    images.gates["a"].set_result(None)
    assert taken(ahead) == "a"
    found = ahead.take(0.0)
    assert found is not None and found[1]["multi_modal_data"]["image"] == [None]  # type: ignore[index, call-overload]
    images.gates["d"].set_result(None)
    assert taken(ahead) == "d"
    ahead.close()


def test_a_wrong_image_leaves_its_prompt_as_it_was() -> None:
    images = Images("a", "b")
    images.gates["a"].set_exception(InvalidRequestError("wrong"))
    images.gates["b"].set_result(None)
    ahead = PreparedAhead(images, map(request, "ab"))  # type: ignore[arg-type]
    found = ahead.take(SOON)
    assert found is not None and found[:2] == request("a")[:2]
    assert taken(ahead) == "b"
    ahead.close()


def test_the_images_of_the_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2 * processed("0").num_bytes - 1)
    images = Images(*"01234")
    for gate in images.gates.values():
        gate.set_result(None)
    ahead = PreparedAhead(images, map(request, "01234"))  # type: ignore[arg-type]
    assert [taken(ahead), taken(ahead)] == ["0", "1"]
    assert ahead.take(0.0) is None
    ahead.ended(["0"])
    assert taken(ahead) == "2"
    ahead.close()


class Engine:
    """Ends a request in the step after it was added. The images of `late` are processed only after a step."""

    def __init__(self, images: Images, late: str) -> None:
        self.images, self.late = images, late
        self.takes_images = True
        self.running: list[str] = []
        self.added: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: object, **_: object) -> None:
        if request_id == "wrong":
            raise InvalidRequestError("wrong")
        self.added.append(request_id)
        self.running.append(request_id)

    def step(self) -> list[Any]:
        assert self.running, "a step without requests"
        for name in self.late:
            if not self.images.gates[name].done():
                self.images.gates[name].set_result(None)
        done, self.running = self.running, []
        return [SimpleNamespace(request_id=each, finished=True) for each in done]

    def abort_requests(self, request_ids: Any) -> None:
        self.aborted += request_ids


def call_of(engine: Engine, *requests: Any) -> _Call:
    return _Call(engine, threading.Lock(), requests)  # type: ignore[arg-type]


def test_the_engine_computes_while_images_are_processed() -> None:
    images = Images(*"acd")
    images.gates["a"].set_result(None)
    engine = Engine(images, late="cd")
    call = call_of(engine, request("a"), text("b"), request("c"), request("d"))
    call.run()
    assert [output.request_id for output in call.outputs.result(0)] == list("abcd")
    assert engine.added == list("abcd") and not engine.aborted


def test_a_wrong_request_ends_the_call_and_is_named() -> None:
    engine = Engine(Images("a"), late="")
    engine.images.gates["a"].set_result(None)
    call = call_of(engine, request("a"), text("wrong"), text("b"))
    call.run()
    error = call.outputs.exception(0)
    assert isinstance(error, InvalidRequestError) and str(error).startswith("prompts[1]: ")
    assert engine.aborted == ["a", "wrong", "b"]


def test_an_interrupt_ends_the_wait_for_an_image() -> None:
    images = Images("a")
    call = call_of(Engine(images, late=""), request("a"))
    call.start()
    wait_for(lambda: images.begun == ["a"])
    call.is_interrupted = True
    call.join(SOON)
    assert isinstance(call.outputs.exception(0), KeyboardInterrupt)
    images.gates["a"].set_result(None)
