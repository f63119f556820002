"""`Shutdown`: the first signal lets running requests end, and the second signal cuts the connections.

If the shutdown hangs, faulthandler prints the stack of every thread and ends the process with exit code 1. faulthandler does
this in a thread of its own, which needs neither the event loop nor the GIL. It does not wait for a reader of stderr.
"""

import asyncio
import contextlib
import faulthandler
import logging
import signal
from collections.abc import Iterator

from inflight.line_writer import open_without_waiting

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CUT_SECONDS = 5.0  # time for the engine to end after connections are cut
# time from the end of the last request to the end of the process: 5 for the connections, 25 for the engine, 5 for the rest
END_SECONDS = 35.0
_STDERR = 2


class Shutdown:
    """Used by one event loop. If the shutdown hangs, the whole process ends, so the process must have no other task than
    serving.

    Args:
        shutdown_timeout: seconds in which running requests must end.
        end_seconds: further seconds, in which the process must end.

    Attributes:
        begun: set when the server must refuse new requests.
        cut: set when the server must cut all connections.
        exit_code: the exit code with which the process must end; 0 unless `cut_now` was called.
    """

    def __init__(self, shutdown_timeout: float, end_seconds: float = END_SECONDS) -> None:
        self._timeout = shutdown_timeout
        self._end_seconds = end_seconds
        self.begun = asyncio.Event()
        self.cut = asyncio.Event()
        self.exit_code = 0
        self._stderr: int | None = None

    def begin(self) -> None:
        if not self.begun.is_set():
            self._end_after(self._timeout + self._end_seconds)
        self.begun.set()

    def cut_now(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._end_after(CUT_SECONDS + self._end_seconds)
        self.begun.set()
        self.cut.set()

    def _end_after(self, seconds: float) -> None:
        if self._stderr is None:
            self._stderr = open_without_waiting(_STDERR)  # stays open until the process ends
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT begins the shutdown, the second one cuts the connections, and the third one kills the
        process. Main thread only."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.begun.is_set():
            logger.info(
                "%s: new requests are refused, running ones have %g s to end; a second signal cuts the connections",
                number.name,
                self._timeout,
            )
            self.begin()
            return
        logger.warning("%s again: connections are cut", number.name)
        self.cut_now(128 + number)
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
