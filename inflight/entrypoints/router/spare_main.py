"""The program of a spare process: `inflight.entrypoints.router.spare_main TITLE CONTROL_FD`. See spare.py."""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

from inflight.entrypoints.router.spare import PROGRAMS, SpareProcess, SpareProgram
from inflight.logs import exit_now
from inflight.processes.child_process import STOPPED_LOOK_SECONDS, ChildProcess, ForkedProcess, name_process
from inflight.processes.command_line import show_title
from inflight.thread_priority import lower_priority

_LOWEST = 19
_MOST_STREAMS = 8


class _TakenSpare:
    """The spare below, as the process that `ChildProcess` has started. It owns the pidfd from now on."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.pidfd = process.pidfd
        self.returncode: int | None = None

    def wait(self) -> int:
        """Call this when the process has ended."""
        self.returncode = self._process.exit_code
        assert self.returncode is not None
        return self.returncode


class _SpareBelow:
    def __init__(self, program: SpareProgram | None) -> None:
        self._program = program
        self._spare = None if program is None else SpareProcess(program)

    @property
    def is_there(self) -> bool:
        return self._spare is not None

    @property
    def is_awaited(self) -> bool:
        """Whether it still imports."""
        return self._spare is not None and self._spare.process.is_alive and not self._spare.is_ready

    def look(self) -> None:
        if self._spare is not None:
            self._spare.process.kill_if_stopped()

    def take(
        self, arguments: Sequence[str], stream_fds: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Let the spare become this program. None if it is for another one, has been taken or is not ready. See
        `ChildProcess.fork`."""
        spare, program = self._spare, self._program
        if spare is None or program is None or arguments[0] != program.module:
            return None
        self._spare = None
        if spare.is_ready:
            with contextlib.suppress(OSError):  # it has just ended
                return _TakenSpare(spare.become(arguments, stream_fds, environment))
        spare.close()
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    title = sys.argv[1].rstrip()
    program = PROGRAMS[title]
    name_process(title)
    control = socket.socket(fileno=int(sys.argv[2]))
    below = _SpareBelow(program.below)  # started by this thread: it ends with the thread that has started it
    # The threads of numpy's linear algebra are started when it is imported, and have the priority of the thread that does so.
    importlib.import_module("numpy")
    importing = threading.Thread(target=_import, args=(program.imports,), name="imports")
    importing.start()
    importing.join()
    while below.is_awaited:
        below.look()
        _wait(control)
    control.send(b".")
    while not _wait(control):
        below.look()
    message, fds, _, _ = socket.recv_fds(control, 1, 1 + _MOST_STREAMS)
    if not message:  # the owner has ended it
        exit_now(0)
    control.close()
    with open(fds[0], closefd=True) as file:
        file.seek(0)
        start = json.load(file)
    arguments = [*start["arguments"], *map(str, fds[1:])]
    os.environ.clear()
    os.environ.update(start["environment"])
    show_title(arguments[1])
    if below.is_there:
        ChildProcess.fork = below.take
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _import(modules: Sequence[str]) -> None:
    lower_priority(_LOWEST)
    for module in modules:
        importlib.import_module(module)


def _wait(control: socket.socket) -> bool:
    """Wait for a message, but not longer than until the next look. Returns whether there is one."""
    return bool(select.select([control], [], [], STOPPED_LOOK_SECONDS)[0])


if __name__ == "__main__":
    main()
