"""`Processors`: processes images in several processes.

Each thread has a process of its own, which gets one image at a time. Images of several clients are processed in turns
(fair_threads.py). If an image takes too long, its process is killed, and the image is refused. If a process ends, or is killed
because a signal has stopped it, its image is tried again in a new one: another cause, such as the kernel's choice when memory
ran out, is as likely as the image. If this one ends, too, the image is refused. Images that wait are never affected: they are
in the queue of this process, and the time for which they wait is not counted.
"""

import logging
import threading
import time
from concurrent.futures import Future
from functools import partial

from inflight.errors import EngineClosedError, EngineError, InvalidRequestError
from inflight.multimodal.counts import ImageCounts
from inflight.multimodal.fair_threads import FairThreads
from inflight.multimodal.messages import Refusal, Start, Task
from inflight.multimodal.processed import ProcessedImage
from inflight.multimodal.processor_process import LostProcessError, ProcessorProcess

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # to import transformers and to read a tokenizer from a slow disk
TASK_SECONDS = 60.0
NUM_TRIES = 2  # of an image whose process ends
MAX_WAITING_BYTES = 2**29  # of all images that wait for a process
IMAGE_BYTES = 2**16  # what an image that waits counts beside its content, so that their number is bounded, too
IMAGE_SECONDS = 0.02  # about what an image takes, and more
BYTE_SECONDS = 4e-8  # for each byte of its file


class Processors:
    """
    Any thread may call the methods. Processes start when they are needed, or with `warm_up`.

    Args:
        start: which processor to load.
        num_processes: the most processes.
        counts: gets the times.
        task_seconds: how long one image may take.
    """

    def __init__(
        self, start: Start, num_processes: int, counts: ImageCounts | None = None, *, task_seconds: float = TASK_SECONDS
    ) -> None:
        self._start = start
        self._num_processes = num_processes
        self._counts = counts or ImageCounts()
        self._task_seconds = task_seconds
        self._threads = FairThreads(
            "images", num_processes, MAX_WAITING_BYTES, "images wait to be processed", at_end=self._drop
        )
        self._lock = threading.Lock()  # for the next two
        self._processes: dict[int, ProcessorProcess] = {}  # number of a thread -> its process
        self._is_closed = False

    def warm_up(self) -> None:
        """Start all processes in the background, so that the first images do not wait for them."""
        for _ in range(self._num_processes):
            self._threads.submit(self._start_early, "", START_SECONDS)

    def submit(self, task: Task, client: str = "") -> Future[ProcessedImage]:
        """Process an image. The future can be cancelled while the image waits. It raises:

        InvalidRequestError: the image or an option is wrong, or the image crashes or hangs its decoder.
        EngineError: the processor of the model cannot be loaded.
        OverloadedError: other clients need the place in the queue.

        Raises:
            OverloadedError: too many images wait, and no client has more of them than this one.
            EngineClosedError: `close` was called.
        """
        size = len(task.content)
        seconds = IMAGE_SECONDS + size * BYTE_SECONDS
        return self._threads.submit(partial(self._answer, task), client, seconds, size + IMAGE_BYTES)

    def share(self, result: Future[ProcessedImage], client: str) -> None:
        """Another client waits for the same image, so it also counts as this client's while it waits."""
        self._threads.share(result, client)

    def close(self) -> None:
        """End the processes at once. Images that wait are not processed. Idempotent."""
        with self._lock:
            self._is_closed = True
            for process in self._processes.values():
                process.kill()
        self._threads.close()

    def _start_early(self, number: int) -> None:
        """In thread `number`. An error comes again with the first image."""
        try:
            self._process(number)
        except EngineError as error:
            if not self._is_closed:
                logger.warning("requests with images will be refused: %s", error)

    def _answer(self, task: Task, number: int) -> ProcessedImage:
        """In thread `number`."""
        begin = time.monotonic()
        try:
            answer = self._ask(number, task)
        except TimeoutError:
            self._drop(number)
            seconds = f"{self._task_seconds:g}"
            logger.warning("an image took more than %s s, so its process is replaced", seconds)
            raise InvalidRequestError(
                f"the image could not be processed within {seconds} seconds; send another one"
            ) from None
        except Exception as error:
            if self._is_closed:
                raise EngineClosedError("the engine was closed") from error
            raise
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, "mm_processor_kwargs" if answer.is_option else "")
        self._counts.processed(time.monotonic() - begin)
        return answer

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
            process = ProcessorProcess(f"inflight: images {number}")
            with self._lock:
                self._processes[number] = process  # `close` ends it from now on
                is_late = self._is_closed
            if is_late:
                process.kill()
            process.load(self._start, START_SECONDS)
        except (TimeoutError, LostProcessError) as error:
            self._drop(number)
            raise EngineError(f"a process for images could not start: {error or 'it took too long'}") from error
        except EngineError:
            self._drop(number)
            raise
        return process

    def _drop(self, number: int) -> None:
        with self._lock:
            process = self._processes.pop(number, None)
        if process is not None:
            process.close()
