"""`ProcessorProcess`: a process that decodes and processes images (processor_main.py), as its owner sees it.

One thread owns it: the kernel kills the process when the thread that started it ends (processes/child.py).
"""

import signal
import socket
import time
from collections.abc import Callable

from inflight.errors import CodecError, EngineError
from inflight.interface.framing import Frame, FrameReader
from inflight.multimodal.messages import Refusal, Start, Task, read_answer, read_readiness, start_frame, task_frame
from inflight.multimodal.processed import ProcessedImage
from inflight.processes.child_process import SIGKILL_SECONDS, STOPPED_LOOK_SECONDS, ChildProcess, wait_for_end

# numpy's library of linear algebra would start a thread for each core, and images are not computed with it. transformers would
# warn that torch is missing.
_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class LostProcessError(EngineError):
    """The process has ended, or has sent something damaged. Its message says why."""


class ProcessorProcess:
    """It begins with `load`.

    Raises:
        LostProcessError: the process could not start.
    """

    def __init__(self, title: str) -> None:
        self._stream, theirs = socket.socketpair()
        self._reader = FrameReader(read_ahead=False)
        try:
            with theirs:
                module = "inflight.multimodal.processor_main"
                self._child = ChildProcess(title, module, [theirs.fileno()], variables=_VARIABLES)
        except OSError as error:
            self._stream.close()
            raise LostProcessError(f"a process for images cannot be started: {error}") from error

    def load(self, start: Start, seconds: float) -> None:
        """Let the process load a processor. After an error, the process must be closed.

        Raises:
            EngineError: transformers has no processor for the model, or cannot load it.
            LostProcessError: the process has ended.
            TimeoutError: it is not ready after so many seconds.
        """
        problem = read_readiness(self._ask(start_frame(start), seconds))
        if problem is not None:
            raise EngineError(f"the processor of this model's images cannot be loaded: {problem}")

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def process(self, task: Task, seconds: float) -> ProcessedImage | Refusal:
        """Process one image. After an error, the process must be closed.

        Raises:
            TimeoutError: there is no answer after so many seconds.
            LostProcessError: the process has ended.
        """
        return read_answer(self._ask(task_frame(task), seconds))

    def kill(self) -> None:
        """End the process. Another thread may wait for its answer, which is a LostProcessError then."""
        self._child.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process, and release it."""
        self._stream.close()
        self.kill()
        wait_for_end([self._child], SIGKILL_SECONDS)
        self._child.close()

    def _ask(self, frame: Frame, seconds: float) -> Frame:
        end = time.monotonic() + seconds
        try:
            for buffer in frame.buffers():
                rest = memoryview(buffer).cast("B")
                while rest:
                    rest = rest[self._in_time(self._stream.send, rest, end) :]
            while True:
                count = self._in_time(self._stream.recv_into, self._reader.buffer(), end)
                if count == 0:
                    raise LostProcessError("a process for images has ended")
                if frames := self._reader.received(count):
                    return frames[0]
        except TimeoutError:
            raise
        except (OSError, CodecError) as error:
            raise LostProcessError(f"a process for images was lost: {error}") from error

    def _in_time(self, call: Callable[[memoryview], int], buffer: memoryview, end: float) -> int:
        """Returns what `call` returns. Meanwhile a process that stays stopped by a signal is killed, so that it has ended.

        Raises:
            TimeoutError: the time `end` has come.
        """
        while True:
            self._stream.settimeout(min(_left(end), STOPPED_LOOK_SECONDS))
            try:
                return call(buffer)
            except TimeoutError:
                self._child.kill_if_stopped()


def _left(end: float) -> float:
    """Seconds until the time `end`.

    Raises:
        TimeoutError: it has passed.
    """
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    return left
