"""`Processors`: processes images in several processes.

Each thread has a process of its own, which gets one image at a time. Threads and processes start when they are needed. If an
image takes too long, its process is killed, and the image is refused. If a process ends, its image is tried again in a new
one, because another cause, such as the kernel's choice when memory ran out, is as likely as the image. If this ends, too, the
image is refused. Images that wait are never affected: they are in the queue of this process.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from inflight.errors import EngineClosedError, EngineError, InvalidRequestError
from inflight.multimodal.messages import Refusal, Start, Task
from inflight.multimodal.processed import ProcessedImage
from inflight.multimodal.processor_process import LostProcessError, ProcessorProcess

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # to import transformers and to read a tokenizer from a slow disk
TASK_SECONDS = 60.0
NUM_TRIES = 2  # of an image whose process ends


@dataclass(eq=False, slots=True)
class _Job:
    task: Task
    result: Future[ProcessedImage] = field(default_factory=Future)


class Processors:
    """
    Any thread may call the methods.

    Args:
        start: which processor to load.
        num_processes: the most processes.
        task_seconds: how long one image may take.
    """

    def __init__(self, start: Start, num_processes: int, *, task_seconds: float = TASK_SECONDS) -> None:
        self._start = start
        self._num_processes = num_processes
        self._task_seconds = task_seconds
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # for the next four
        self._processes: dict[int, ProcessorProcess] = {}  # number of a thread -> its process
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0  # jobs
        self._is_closed = False

    def submit(self, task: Task) -> Future[ProcessedImage]:
        """Process an image. The future can be cancelled while the image waits. It raises:

        InvalidRequestError: the image or an option is wrong, or the image crashes or hangs its decoder.
        EngineError: the processor of the model cannot be loaded.
        """
        job = _Job(task)
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine was closed; make a new one")
            self._num_unfinished += 1
            if self._num_unfinished > len(self._threads) < self._num_processes:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._run, args=[number], name=f"inflight-images-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """End the processes at once. Images that wait are not processed. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for process in self._processes.values():
                process.kill()
            for _ in self._threads:
                self._jobs.put(None)

    def _run(self, number: int) -> None:
        """In a thread."""
        while (job := self._jobs.get()) is not None:
            if job.result.set_running_or_notify_cancel():
                if self._is_closed:
                    job.result.set_exception(EngineClosedError("the engine was closed"))
                else:
                    self._answer(number, job)
            with self._lock:
                self._num_unfinished -= 1
            del job  # its image may be large, and the next one may come late
        self._drop(number)

    def _answer(self, number: int, job: _Job) -> None:
        try:
            answer = self._ask(number, job.task)
        except TimeoutError:
            self._drop(number)
            seconds = f"{self._task_seconds:g}"
            logger.warning("an image took more than %s s, so its process is replaced", seconds)
            job.result.set_exception(
                InvalidRequestError(f"the image could not be processed within {seconds} seconds; send another one")
            )
        except Exception as error:
            job.result.set_exception(EngineClosedError("the engine was closed") if self._is_closed else error)
        else:
            _settle(job.result, answer)

    def _ask(self, number: int, task: Task) -> ProcessedImage | Refusal:
        for num_tries in range(1, NUM_TRIES + 1):
            process = self._process(number)
            try:
                return process.process(task, self._task_seconds)
            except LostProcessError as error:
                self._drop(number)
                logger.warning("%s (try %d of %d of its image)", error, num_tries, NUM_TRIES)
        raise InvalidRequestError("the image ends the process that decodes it; send another one")

    def _process(self, number: int) -> ProcessorProcess:
        """The process of this thread, which is started if it does not live."""
        process = self._processes.get(number)
        if process is not None and process.is_alive:
            return process
        self._drop(number)
        try:
            process = ProcessorProcess(f"inflight: images {number}", self._start, START_SECONDS)
        except (TimeoutError, LostProcessError) as error:
            raise EngineError(f"a process for images could not start: {error or 'it took too long'}") from error
        with self._lock:
            self._processes[number] = process
            is_late = self._is_closed
        if is_late:
            process.kill()
        return process

    def _drop(self, number: int) -> None:
        with self._lock:
            process = self._processes.pop(number, None)
        if process is not None:
            process.close()


def _settle(result: Future[ProcessedImage], answer: ProcessedImage | Refusal) -> None:
    if isinstance(answer, Refusal):
        result.set_exception(InvalidRequestError(answer.message, "mm_processor_kwargs" if answer.is_option else ""))
    else:
        result.set_result(answer)
