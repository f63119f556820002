"""`Shutdown`: asked for once, the server lets its requests end; asked for again, it cuts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CUT_SECONDS = 5.0  # what the engine has to end once connections are cut


class Shutdown:
    """Of one event loop.

    Attributes:
        begun: new requests are refused, running ones have their time.
        cut: connections are cut.
        exit_code: of the process, once one of them is set.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cut = asyncio.Event()
        self.exit_code = 0

    def cut_now(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.begun.set()
        self.cut.set()

    @contextlib.contextmanager
    def on_signals(self, shutdown_timeout: float) -> Iterator[None]:
        """SIGTERM or SIGINT begins it, a second one cuts, a third one kills this process. Main thread only.

        Args:
            shutdown_timeout: seconds, for the log.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, shutdown_timeout)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals, shutdown_timeout: float) -> None:
        if not self.begun.is_set():
            logger.info(
                "%s: new requests are refused, running ones have %g s; once more stops at once",
                number.name,
                shutdown_timeout,
            )
            self.begun.set()
            return
        logger.warning("%s again: connections are cut", number.name)
        self.cut_now(128 + number)
        for handled in SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
