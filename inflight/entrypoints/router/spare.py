"""`SpareProcess`: a process that has imported the libraries of a program, and waits until it becomes this program.

    this process  -- one byte, with descriptors: a file in memory, and those of the program's streams -->  spare (spare_main.py)
                  <-- one byte: the libraries are imported --

The file has the arguments and the environment of the program. The spare of a model's server has a spare of its own, for the
engine that this server starts. A spare imports with the lowest priority, so it takes no time from models that compute; the
program runs with the usual one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight.entrypoints.apis import APIS
from inflight.processes.child_process import ChildProcess, child_environment, stop_processes
from inflight.sockets import socket_pair

logger = logging.getLogger(__name__)

_MAIN = "inflight.entrypoints.router.spare_main"
_TITLE_BYTES = 64  # room for the title that `ps` shows when the spare has become its program
_PAUSE_SECONDS = 2.0  # after a load, or after a spare has ended, before the next one is started
_END_SECONDS = 5.0  # for a spare to end after SIGKILL


@dataclass(frozen=True)
class SpareProgram:
    """
    Attributes:
        title: of the spare.
        module: the program, as for `ChildProcess`.
        imports: modules that it imports. The program itself is not among them, because it runs as `__main__`.
        below: a program that it starts.
    """

    title: str
    module: str
    imports: tuple[str, ...]
    below: SpareProgram | None = None


ENGINE = SpareProgram(
    "inflight: spare engine",
    "inflight.engine.process.core_process",
    (
        "inflight.worker.worker",
        "inflight.engine.process.control_socket",
        "inflight.engine.process.head_links",
        "inflight.engine.start.make_core",
        "inflight.engine.start.model_files",
        "inflight.executor.uniproc",
    ),
)
MODEL = SpareProgram(
    "inflight: spare model",
    "inflight.entrypoints.router.model_main",
    (
        "inflight.entrypoints.serve.engine_start",
        "inflight.entrypoints.serve.front_end_main",
        "inflight.entrypoints.http.app",
        *(api.routes for api in APIS.values()),
    ),
    below=ENGINE,
)
PROGRAMS = {each.title: each for each in (MODEL, ENGINE)}


class SpareProcess:
    """Call `become` at most once, and otherwise `close`.

    Raises:
        OSError: the system cannot start a process now.
    """

    def __init__(self, program: SpareProgram) -> None:
        self._program = program
        self._is_ready = False
        with socket_pair() as (self._control, theirs):
            self.process = ChildProcess(program.title.ljust(_TITLE_BYTES), _MAIN, [theirs.fileno()])
        self._control.setblocking(False)

    @property
    def is_ready(self) -> bool:
        """Whether the process lives, and has imported the libraries."""
        if not self._is_ready:
            try:
                self._is_ready = bool(self._control.recv(1))
            except OSError:  # it still imports, or has ended
                return False
        return self._is_ready and self.process.is_alive

    def become(
        self, arguments: Sequence[str], stream_fds: Sequence[int], environment: Mapping[str, str]
    ) -> ChildProcess:
        """Let the process become its program. Returns the process.

        Args:
            arguments: the module and its arguments. The last of them are the numbers of `stream_fds`.

        Raises:
            OSError: the process has ended.
        """
        own = list(arguments[: len(arguments) - len(stream_fds)])
        file = os.memfd_create("inflight-spare")
        try:
            os.write(file, json.dumps({"arguments": own, "environment": dict(environment)}).encode())
            socket.send_fds(self._control, [b"."], [file, *stream_fds])
        finally:
            os.close(file)
        self._control.close()
        self.process.title = arguments[1]
        return self.process

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self.process.send_signal(signal.SIGKILL)  # it has nothing to lose
        stop_processes([self.process], _END_SECONDS)
        self.process.close()


class ModelSpare:
    """Keeps one spare process for the next model that is loaded. Used by one event loop.

    Args:
        is_wanted: whether there is a spare at all.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._spare: SpareProcess | None = None
        self._next_time = 0.0  # when another one may be started

    def start(
        self, title: str, module: str, stream_fds: Sequence[int], *, variables: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """As `ChildProcess`, but the spare is used if it is ready."""
        self._next_time = time.monotonic() + _PAUSE_SECONDS
        spare = self._spare
        if spare is not None and spare.is_ready and module == MODEL.module:
            self._spare = None
            environment = child_environment({**os.environ, **(variables or {})}, sys.path)
            try:
                return spare.become([module, title, *map(str, stream_fds)], stream_fds, environment)
            except OSError as error:
                logger.warning("the spare process of a model cannot be used: %s", error)
                spare.close()
        return ChildProcess(title, module, stream_fds, variables=variables)

    def look(self, *, is_loading: bool) -> None:
        """Start a spare if there is none, unless a model is loading; end one that is stopped by a signal. Call this every
        STOPPED_LOOK_SECONDS."""
        now = time.monotonic()
        if is_loading:
            self._next_time = now + _PAUSE_SECONDS
        if self._spare is not None:
            self._spare.process.kill_if_stopped()
            if not self._spare.process.is_alive:
                logger.warning("the spare process of a model has ended (%s)", self._spare.process.state)
                self.close()
                self._next_time = now + _PAUSE_SECONDS
        elif self._is_wanted and not is_loading and now >= self._next_time:
            try:
                self._spare = SpareProcess(MODEL)
            except OSError as error:
                logger.warning("no spare process for the next model can be started: %s", error)
                self._next_time = now + _PAUSE_SECONDS

    def close(self) -> None:
        """End the spare."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
