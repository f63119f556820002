"""The program of one model's process: a whole server, with its engine, at a socket that only the router reaches.

    inflight.entrypoints.router.model_main TITLE LISTENER_FD CONTROL_FD START_FD

It is started and told to end as a front end is (serve/front_end_main.py): "drain" or "cut" comes in, and {"ready": description}
or {"failed": [class name, message]} goes out. It checks no API keys: the router does, and says in headers which client sent a
request.
"""

import asyncio
import importlib
import signal
import socket
import sys
from dataclasses import replace

import uvloop

from inflight.engine.serving.client import CLIENT
from inflight.entrypoints.serve.asgi import ASGIApp, Receive, Scope, Send, header_of
from inflight.entrypoints.serve.engine_start import ServedModel
from inflight.entrypoints.serve.front_end_main import EXIT_FAILED, Control, FrontEndStart, report
from inflight.entrypoints.serve.server import Server, StartUpClock
from inflight.entrypoints.serve.shutdown import SIGNALS, Shutdown
from inflight.errors import InflightError
from inflight.interface.image_prompts import OWNER
from inflight.logs import exit_now
from inflight.processes.child_process import name_process

OWNER_HEADER, CLIENT_HEADER = b"x-inflight-owner", b"x-inflight-client"


class ClientsOfRouter:
    """Takes the digest of the API key and the name of the client from the router's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        OWNER.set((header_of(scope, OWNER_HEADER) or b"").decode("latin-1"))
        CLIENT.set((header_of(scope, CLIENT_HEADER) or b"").decode("latin-1"))
        await self._app(scope, receive, send)


def main() -> int:
    for number in (*SIGNALS, signal.SIGHUP):  # a terminal sends them to all processes; the router says when to end
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    listener, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[2:4])
    start = FrontEndStart.from_file(int(sys.argv[4]))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_now(runner.run(_serve(start, listener, control)))
    except InflightError as error:
        report(control, {"failed": [type(error).__name__, str(error)]})
        return EXIT_FAILED


async def _serve(start: FrontEndStart, listener: socket.socket, control_socket: socket.socket) -> int:
    shutdown = Shutdown(start.settings.shutdown_timeout)
    control = Control(control_socket, shutdown, 0)

    async def start_model() -> ServedModel:
        engine_start = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_start")
        model: ServedModel = await engine_start.start(start.settings, start.args, StartUpClock())
        report(control_socket, {"ready": model.description})
        return replace(model, app=ClientsOfRouter(model.app))

    try:
        server = Server(start.settings, None, start_model, shutdown, accepts_early=False)
        return await server.run(listener)
    finally:
        control.close()


if __name__ == "__main__":
    exit_now(main())
