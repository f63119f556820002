"""A server ends with its terminal, unless it was told to outlive it."""

from __future__ import annotations

import os
import pty
import signal
import sys

import pytest

from tests.support.python_process import ROOT, PythonProcess

SCRIPT = """
import fcntl, os, signal, sys, termios
master, slave = int(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[3] == "nohup" else signal.SIG_DFL)  # pytest may run with nohup
if sys.argv[3] != "no terminal":
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
from inflight.entrypoints.serve.terminal import ServerTerminal
terminal = ServerTerminal()
signal.signal(signal.SIGHUP, lambda *_: None)
assert not terminal.was_closed
os.kill(os.getpid(), signal.SIGHUP)
assert not terminal.was_closed, "an operator has sent it"
os.close(slave)
os.close(master)
sys.exit(10 + terminal.was_closed)
"""


@pytest.mark.parametrize(("how", "was_closed"), [("plain", True), ("nohup", False), ("no terminal", False)])
def test_it_knows_that_its_terminal_was_closed(how: str, was_closed: bool) -> None:
    before = signal.getsignal(signal.SIGHUP)
    master, slave = pty.openpty()
    try:
        command = [sys.executable, "-c", SCRIPT, str(master), str(slave), how]
        process = PythonProcess(command, pass_fds=(master, slave), start_new_session=True, cwd=ROOT)
    finally:
        os.close(master)
        os.close(slave)
    assert process.wait(300) == 10 + was_closed
    assert signal.getsignal(signal.SIGHUP) is before
