"""`ServerTerminal`: whether the terminal in which the server was started is still there.

SIGHUP has two meanings. Sent by an operator, it lets a server read its files again. Sent by the kernel or the shell because the
terminal was closed, it ends a program. In the second case the process has no controlling terminal any more.
"""

import os
import signal

_OWN_TERMINAL = "/dev/tty"  # can be opened by a process that has a controlling terminal


class ServerTerminal:
    """Make it before the handling of SIGHUP is changed: with `nohup` the signal is ignored, and then the end of the terminal
    does not count."""

    def __init__(self) -> None:
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _exists()

    @property
    def was_closed(self) -> bool:
        return self._ends_with_terminal and not _exists()


def _exists() -> bool:
    try:
        os.close(os.open(_OWN_TERMINAL, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
