"""LineWriter: writes lines to a descriptor in a thread of its own, so that nobody waits for a slow reader of the log.

A pipe that nobody reads (a paused terminal, a log driver that hangs) takes 64 KiB, and then a write waits for ever. So only the
thread of the writer writes to it: other threads add lines to a bounded queue. What does not fit is dropped and counted, and the
count is reported when lines are written again.

The thread writes to the descriptor, not to a stream such as sys.stdout. While a pipe is full, a write to the stream would hold
the lock of the stream, and every `print` of other threads would wait for this lock.
"""

import contextlib
import os
import queue
import select
import stat
import threading
from collections.abc import Callable

# What may wait to be written: a few seconds of a busy server.
MAX_LINES = 10_000
MAX_BYTES = 8 * 2**20

_Queue = queue.SimpleQueue[bytes | threading.Event | None]


class LineWriter:
    """
    Args:
        fd: the descriptor.
        report: called with the number of all lines that were dropped so far, if it has changed: at the first one, when lines
            are written again, and in `close`. Any thread may call it. It may call `put`.

    Attributes:
        num_dropped: how many lines were dropped, because too many waited or because they could not be written.
    """

    def __init__(self, fd: int, report: Callable[[int], None]) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._report = report
        self._num_reported = 0
        self._start()

    def put(self, line: str) -> None:
        """Add a line, which ends with a line feed. Never blocks and never fails."""
        if self._pid != os.getpid():  # this process was forked: it has a copy of the queue, but not the thread
            self._start()
        data = line.encode(errors="backslashreplace")
        with self._lock:
            fits = self._queue.qsize() < MAX_LINES and self._num_bytes + len(data) <= MAX_BYTES
            if fits:
                self._num_bytes += len(data)
                self._queue.put(data)
        if not fits:
            self._drop()

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the lines that were added are written. Returns whether they are."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return True
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout)

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until all lines are written. Lines that are added later are lost. Call it once."""
        if self._pid == os.getpid():
            self._queue.put(None)
            self._thread.join(timeout)
        self._report_dropped()

    def _start(self) -> None:
        self._pid = os.getpid()
        # Protects the counts. Reentrant, because a garbage collection may call a method that logs while this thread has it.
        self._lock = threading.RLock()
        self._num_bytes = 0
        self._queue: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, args=(self._queue,), name="inflight-lines", daemon=True)
        self._thread.start()

    def _write_all(self, lines: _Queue) -> None:
        while (line := lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write(line, lines)

    def _write(self, line: bytes, lines: _Queue) -> None:
        left = line
        try:
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:  # the process that made the pipe has set O_NONBLOCK
                    select.select([], [self._fd], [])
        except (OSError, ValueError):  # nobody reads the output any more, or the disk is full
            self._drop()
        with self._lock:
            self._num_bytes -= len(line)
            has_room = lines.qsize() <= MAX_LINES // 2 and self._num_bytes <= MAX_BYTES // 2
        if not left and has_room:
            self._report_dropped()

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
            is_first = self.num_dropped == 1
        if is_first:
            self._report_dropped()

    def _report_dropped(self) -> None:
        with self._lock:
            num_dropped = self.num_dropped
            is_new = num_dropped > self._num_reported
            self._num_reported = num_dropped
        if is_new:
            self._report(num_dropped)


def open_without_waiting(fd: int) -> int:
    """Open the file of a descriptor once more, so that writes to the new descriptor never wait. Where this is not possible
    (sockets, and pipes of another user), the result is `fd` itself. The flag O_NONBLOCK cannot be set at `fd`, because the
    processes that share it, such as the user's shell, would get it, too."""
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return fd
