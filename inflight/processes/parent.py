"""`die_with_parent`: no process is left without the one that started it. `outlive_parent`: for a process that ends with its
streams only."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. By default the signal kills it, even if
    it is stopped. If the process `parent` has ended already, end now."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def outlive_parent() -> None:
    """Go on as a process that has init as its parent, and a session of its own. This process prints the id of the new one, and
    ends."""
    if pid := os.fork():
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    os.dup2(2, 1)  # whoever reads the id waits for the end of this output
