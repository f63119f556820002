"""`run_server`: what `inflight serve` does once its options are known to be right."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import ssl
import sys
from dataclasses import replace

import uvloop

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import Running, Server
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.start_up import StartUpClock
from inflight.entrypoints.serve.tls import make_ssl_context

logger = logging.getLogger(__name__)


def run_server(settings: ServerSettings, args: EngineArgs) -> int:
    """Serve until a signal; returns the exit code. Main thread only.

    Raises:
        ConfigError: the address, a file, the model or the machine does not fit.
        EngineError: the engine could not start, or has died.
    """
    clock = StartUpClock()
    ssl_context = make_ssl_context(settings)
    listener = Listener(settings)
    try:
        settings = settings if listener.port is None else replace(settings, port=listener.port)
        clock.mark("listening")
        warn_if_open(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_serve(settings, args, listener, ssl_context, clock))
            if code:  # cut: nothing that still runs here is waited for, and no process of ours outlives this one
                listener.close()
                logging.shutdown()
                sys.stdout.flush()
                os._exit(code)
            return code
    finally:
        listener.close()


def warn_if_open(settings: ServerSettings) -> None:
    """Others can reach a server that asks for no key."""
    if not settings.is_local and not settings.api_keys and settings.ssl_ca_certs is None:
        logger.warning(
            "%s answers everybody who can reach it: give --api-key-file, or listen on 127.0.0.1 only", settings.url
        )


async def _serve(
    settings: ServerSettings,
    args: EngineArgs,
    listener: Listener,
    ssl_context: ssl.SSLContext | None,
    clock: StartUpClock,
) -> int:
    async def start() -> Running:
        return await _start(settings, args, clock)

    server = Server(settings, ssl_context, start)
    return await server.run(listener.socket)


async def _start(settings: ServerSettings, args: EngineArgs, clock: StartUpClock) -> Running:
    """The engine and the app before it. Modules are imported on a thread: /live is answered meanwhile.

    Raises:
        ConfigError, EngineError: nothing is left running.
    """
    engine_start = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_start")
    clock.mark("importing")
    running: Running = await engine_start.start(settings, args, clock)
    return running
