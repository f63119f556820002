"""`ServerTerminal`: what SIGHUP means for a server.

Sent by an operator, it lets a server read its files again. Sent by the kernel or the shell because the terminal was closed, it
ends a program. In the second case the process has no controlling terminal any more.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable

logger = logging.getLogger(__name__)

_OWN_TERMINAL = "/dev/tty"  # can be opened by a process that has a controlling terminal


class ServerTerminal:
    """Make it before the handling of SIGHUP is changed: with `nohup` the signal is ignored, and then the end of the terminal
    does not count."""

    def __init__(self) -> None:
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _exists()

    @property
    def was_closed(self) -> bool:
        return self._ends_with_terminal and not _exists()

    def on_hangup(self, end: Callable[[], None], read_again: Callable[[], None] | None = None) -> None:
        """From now on, SIGHUP calls `end` if the terminal was closed, and `read_again` otherwise. `read_again` is None if there
        are no files that could be read again. Call it on the event loop, in the main thread."""

        def record() -> None:
            if self.was_closed:
                end()
            elif read_again is not None:
                read_again()
            else:
                logger.info("SIGHUP: there is no file of certificates or API keys to read again; this process goes on")

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, record)


def _exists() -> bool:
    try:
        os.close(os.open(_OWN_TERMINAL, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
