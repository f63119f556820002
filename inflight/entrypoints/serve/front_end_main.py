"""The program of one of several front ends: `python -m inflight.entrypoints.serve.front_end_main TITLE LISTENER_FD CONTROL_FD`.

It ignores SIGINT and SIGTERM, which a terminal or a supervisor sends to the whole group: the command says when to end. When
the command is gone, it ends at once.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from typing import NoReturn, cast

import uvloop

from inflight.entrypoints.serve.control import EXIT_COMMAND_GONE, Control, FrontEndStart, tell_failure, tell_ready
from inflight.entrypoints.serve.server import Running, Server
from inflight.entrypoints.serve.shutdown import SIGNALS, Shutdown
from inflight.entrypoints.serve.start_up import StartUpClock
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.errors import InflightError
from inflight.executor.process import name_process

EXIT_FAILED = 1


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    listener, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[2:])
    start = FrontEndStart.receive(control)
    if start is None:
        return EXIT_COMMAND_GONE
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _leave(runner.run(_serve(start, listener, control)))  # exits without waiting for threads
    except InflightError as error:
        tell_failure(control, error)
        return EXIT_FAILED


async def _serve(start: FrontEndStart, listener: socket.socket, control_socket: socket.socket) -> int:
    shutdown = Shutdown(start.settings.shutdown_timeout)
    control = Control(control_socket, shutdown)
    clock = StartUpClock()

    async def start_model() -> Running:
        engine_start = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_start")
        clock.mark("importing")
        model = await engine_start.start(
            start.settings,
            start.args,
            clock,
            engine_socket=control.engine_socket,
            records_engine=start.records_engine,
        )
        tell_ready(control_socket, model.description)
        try:
            await control.opened.wait()  # all are ready: what one says holds for the others
        except BaseException:
            await model.close()
            raise
        return cast("Running", model)

    try:
        return await Server(start.settings, make_ssl_context(start.settings), start_model, shutdown).run(listener)
    finally:
        control.close()


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
