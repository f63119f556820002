"""Images are processed in processes: what the processes answer, and what happens when one ends or hangs."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import EngineClosedError, EngineError, InvalidRequestError, OverloadedError
from inflight.interface.framing import Frame
from inflight.multimodal import processors as module
from inflight.multimodal.messages import MessageKind, Refusal, Start, Task, answer_frame, read_answer
from inflight.multimodal.processed import ProcessedImage, ProcessedInput
from inflight.multimodal.processor_process import LostProcessError
from inflight.multimodal.processors import Processors
from inflight.processes.child_process import ChildProcess
from tests.support.image_models import as_bytes, drawing, file_of, write_image_model

SOON = 300.0  # seconds that nothing here takes


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("qwen")
    write_image_model(folder, "qwen2_5_vl")
    return Start(folder=folder, tokenizer=folder)


@pytest.fixture(scope="module")
def processors(start: Start) -> Iterator[Processors]:
    made = Processors(start, 1)
    yield made
    made.close()


def task_of(content: bytes, **options: object) -> Task:
    return Task(content=as_bytes(content), shape=None, options=options)


GOOD = task_of(file_of(drawing(60, 40)))


def pid_of(processors: Processors) -> int:
    return processors._processes[0]._child.pid


def test_a_file_and_its_pixels_have_the_same_result(processors: Processors) -> None:
    image = drawing(60, 40)
    pixels = np.asarray(image)
    by_file = processors.submit(GOOD).result(SOON)
    by_pixels = processors.submit(Task(content=pixels.reshape(-1), shape=pixels.shape, options={})).result(SOON)
    assert by_file.inputs[0].digest == by_pixels.inputs[0].digest
    assert np.array_equal(by_file.inputs[0].pixels, by_pixels.inputs[0].pixels)
    assert by_file.expansion == "<|image_pad|>" * by_file.inputs[0].num_tokens
    with pytest.raises(ValueError, match="read-only"):
        by_file.inputs[0].pixels[0, 0] = 1


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (task_of(b"no image"), ""),
        (task_of(file_of(drawing(300, 300))[:-100]), ""),
        (task_of(file_of(drawing(60, 40)), unknown=1), "mm_processor_kwargs"),
        (task_of(file_of(drawing(3000, 2))), ""),
        # so many pixels that the process has no memory for them
        (
            task_of(file_of(drawing(60, 40)), size={"shortest_edge": 10**9, "longest_edge": 10**10}),
            "mm_processor_kwargs",
        ),
    ],
    ids="no-image truncated option ratio memory".split(),
)
def test_a_wrong_image_is_refused_and_the_process_goes_on(task: Task, param: str, processors: Processors) -> None:
    processors.submit(GOOD).result(SOON)
    pid = pid_of(processors)
    with pytest.raises(InvalidRequestError) as error:
        processors.submit(task).result(SOON)
    assert error.value.param in (param, "")
    assert processors.submit(GOOD).result(SOON).inputs
    assert pid_of(processors) == pid


def test_the_process_does_not_import_torch(processors: Processors) -> None:
    processors.submit(GOOD).result(SOON)
    assert "libtorch" not in Path(f"/proc/{pid_of(processors)}/maps").read_text()


def test_a_process_that_was_killed_while_it_waited_costs_nothing(processors: Processors) -> None:
    processors.submit(GOOD).result(SOON)
    os.kill(pid := pid_of(processors), signal.SIGKILL)
    assert processors.submit(GOOD).result(SOON).inputs
    assert pid_of(processors) != pid


def test_the_image_of_a_process_that_ends_is_tried_again(processors: Processors) -> None:
    processors.submit(GOOD).result(SOON)
    os.kill(pid := pid_of(processors), signal.SIGSTOP)
    result = processors.submit(GOOD)
    wait_for(result.running)
    os.kill(pid, signal.SIGKILL)
    assert result.result(SOON).inputs


@pytest.mark.parametrize("is_large", [False, True])
def test_the_image_of_a_stopped_process_is_tried_again(processors: Processors, is_large: bool) -> None:
    """A large image does not fit into the buffer of the socket, so its sending waits, too."""
    noise = np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    task = Task(content=noise.reshape(-1), shape=noise.shape, options={}) if is_large else GOOD
    processors.submit(GOOD).result(SOON)
    os.kill(pid := pid_of(processors), signal.SIGSTOP)
    assert processors.submit(task).result(SOON).inputs
    assert pid_of(processors) != pid


def test_an_image_that_takes_too_long_is_refused_and_others_are_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ChildProcess, "kill_if_stopped", lambda process: None
    )  # a stopped process stands for a slow one
    processors = Processors(start, 1, task_seconds=SOON)
    try:
        processors.submit(GOOD).result(SOON)
        os.kill(pid_of(processors), signal.SIGSTOP)
        processors._task_seconds = 1.0
        hanging = processors.submit(GOOD)
        wait_for(hanging.running)
        processors._task_seconds = SOON
        waiting = [processors.submit(GOOD) for _ in range(3)]
        with pytest.raises(InvalidRequestError, match="within"):
            hanging.result(SOON)
        assert all(each.result(SOON).inputs for each in waiting)
    finally:
        processors.close()


def test_a_cancelled_image_is_not_processed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Task] = []
    gate = Future[None]()

    class Process(FakeProcess):
        def process(self, task: Task, seconds: float) -> Refusal:
            seen.append(task)
            gate.result(SOON)
            return Refusal(message="done")

    monkeypatch.setattr(module, "ProcessorProcess", Process)
    processors = Processors(start, 1)
    first, second, third = (processors.submit(task_of(name)) for name in (b"1", b"2", b"3"))
    wait_for(first.running)
    assert second.cancel()
    gate.set_result(None)
    with pytest.raises(InvalidRequestError, match="done"):
        third.result(SOON)
    assert [bytes(task.content) for task in seen] == [b"1", b"3"]
    processors.close()


def test_many_images_of_one_client_delay_only_this_client(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    gate = Future[None]()

    class Process(FakeProcess):
        def process(self, task: Task, seconds: float) -> Refusal:
            gate.result(SOON)
            seen.append(bytes(task.content[:5]))
            return Refusal(message="done")

    monkeypatch.setattr(module, "ProcessorProcess", Process)
    processors = Processors(start, 1)
    large = [processors.submit(task_of(b"large" * 1000), "many") for _ in range(20)]
    wait_for(large[0].running)
    small = processors.submit(task_of(b"small"), "other")
    gate.set_result(None)
    for each in (small, *large):
        with pytest.raises(InvalidRequestError, match="done"):
            each.result(SOON)
    assert seen.index(b"small") <= 1
    processors.close()


def test_who_fills_the_queue_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 10 * module.IMAGE_BYTES)
    monkeypatch.setattr(module, "ProcessorProcess", FakeProcess)
    processors = Processors(start, 1)
    accepted = [processors.submit(task_of(b""), "many")]
    wait_for(accepted[0].running)
    accepted += [processors.submit(task_of(b""), "many") for _ in range(10)]
    with pytest.raises(OverloadedError):
        processors.submit(task_of(b""), "many")
    others = processors.submit(task_of(b""), "other")
    assert isinstance(accepted[-1].exception(SOON), OverloadedError), "the newest of the client with most"
    assert not others.done()
    assert accepted[-2].cancel()  # leaves the queue at once
    processors.submit(task_of(b""), "third")
    assert not accepted[-3].done()
    processors.close()


def test_an_image_that_ends_every_process_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process(FakeProcess):
        def process(self, task: Task, seconds: float) -> Refusal:
            if bytes(task.content) == b"bad":
                self.is_alive = False
                raise LostProcessError("it has ended")
            return Refusal(message="done")

    monkeypatch.setattr(module, "ProcessorProcess", Process)
    processors = Processors(start, 1)
    with pytest.raises(InvalidRequestError, match="ends the process"):
        processors.submit(task_of(b"bad")).result(SOON)
    with pytest.raises(InvalidRequestError, match="done"):
        processors.submit(task_of(b"good")).result(SOON)
    assert FakeProcess.num_open == 1
    processors.close()
    wait_for(lambda: FakeProcess.num_open == 0)


class FakeProcess:
    num_open = 0

    def __init__(self, *_: object) -> None:
        FakeProcess.num_open += 1
        self.is_alive = True
        self.killed = Future[None]()

    def load(self, start: Start, seconds: float) -> None:
        pass

    def process(self, task: Task, seconds: float) -> Refusal:
        self.killed.result(SOON)
        return Refusal(message="killed")

    def kill(self) -> None:
        if not self.killed.done():
            self.killed.set_result(None)

    def close(self) -> None:
        FakeProcess.num_open -= 1


def test_processes_start_when_they_are_needed_and_end_at_close(start: Start) -> None:
    processors = Processors(start, 2)
    assert not processors._processes
    processors.submit(GOOD).result(SOON)
    assert len(processors._processes) == 1
    both = [processors.submit(GOOD) for _ in range(6)]
    assert all(each.result(SOON).inputs for each in both)
    wait_for(lambda: len(processors._processes) == 2)
    children = [each._child for each in processors._processes.values()]
    processors.close()
    processors.close()
    wait_for(lambda: not any(child.is_alive for child in children))
    with pytest.raises(EngineClosedError):
        processors.submit(GOOD)


def test_warm_processes_have_loaded_their_processor(start: Start) -> None:
    processors = Processors(start, 2)
    processors.warm_up()
    wait_for(lambda: not processors._threads._waiting and not processors._threads._num_running)
    pids = {process._child.pid for process in processors._processes.values()}
    processors.submit(GOOD).result(SOON)
    assert len(pids) == 2 and {process._child.pid for process in processors._processes.values()} == pids
    processors.close()


def test_close_ends_a_process_that_is_still_loading(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Future[None]()

    class Process(FakeProcess):
        def load(self, start: Start, seconds: float) -> None:
            loading.set_result(None)
            self.killed.result(SOON)
            raise LostProcessError("killed")

    monkeypatch.setattr(module, "ProcessorProcess", Process)
    before = FakeProcess.num_open
    processors = Processors(start, 1)
    processors.warm_up()
    loading.result(SOON)
    processors.close()
    wait_for(lambda: FakeProcess.num_open == before)


def test_close_does_not_wait_for_an_image(start: Start) -> None:
    processors = Processors(start, 1)
    processors.submit(GOOD).result(SOON)
    os.kill(pid_of(processors), signal.SIGSTOP)
    hanging, waiting = processors.submit(GOOD), processors.submit(GOOD)
    wait_for(hanging.running)
    processors.close()
    for each in (hanging, waiting):
        with pytest.raises(EngineClosedError):
            each.result(SOON)


@pytest.mark.parametrize("wrong", ["text model", "damaged tokenizer"])
def test_a_processor_that_cannot_be_loaded_is_an_error_of_the_engine(wrong: str, tmp_path: Path) -> None:
    write_image_model(tmp_path, "qwen2_5_vl")
    if wrong == "text model":
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    else:
        (tmp_path / "tokenizer.json").write_text("{")
    processors = Processors(Start(folder=tmp_path, tokenizer=tmp_path), 1)
    with pytest.raises(EngineError, match="cannot be loaded"):
        processors.submit(GOOD).result(SOON)
    processors.close()


def test_answers_survive_the_wire() -> None:
    rng = np.random.default_rng(0)
    inputs = tuple(
        ProcessedInput(
            pixels=rng.random(shape, dtype=np.float32), grid=(1, 2, 3), num_tokens=7, digest=bytes(range(32))
        )
        for shape in ((3, 4, 5), (6, 8))
    )
    image = ProcessedImage(placeholder="<image>", expansion="<image>" * 7, inputs=inputs)
    found = read_answer(answer_frame(image))
    assert isinstance(found, ProcessedImage)
    assert (found.placeholder, found.expansion, found.num_bytes) == (
        image.placeholder,
        image.expansion,
        image.num_bytes,
    )
    for mine, theirs in itertools.zip_longest(inputs, found.inputs):
        assert np.array_equal(mine.pixels, theirs.pixels)
        assert (mine.grid, mine.num_tokens, mine.digest) == (theirs.grid, theirs.num_tokens, theirs.digest)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageKind.PROCESSED, b'["a", "b", [[[3], [1, 1, 1], 1, "00"]]]'),  # without its segment
        (MessageKind.PROCESSED, b"[]"),
        (MessageKind.READY, b"{}"),
    ],
)
def test_a_damaged_answer_is_an_error(kind: MessageKind, body: bytes) -> None:
    with pytest.raises(EngineError):
        read_answer(Frame(kind, body))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
