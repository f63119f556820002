"""`run_server`: runs the server after the options of `inflight serve` have been checked."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import uvloop

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.response_store.place import StorePlace
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import Server, StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.hub import check_model_name
from inflight.logs import exit_now

if TYPE_CHECKING:
    from inflight.entrypoints.serve.engine_start import ServedModel

logger = logging.getLogger(__name__)


def run_server(settings: ServerSettings, args: EngineArgs) -> NoReturn:
    """Serve until a signal comes, and then end the process. Call it in the main thread.

    Raises:
        ConfigError: the address, a file or the model cannot be used, or does not fit the machine.
        EngineError: the engine or a front end could not start, or has died.
    """
    terminal = ServerTerminal()
    # Until a handler is installed, SIGHUP must not end the process. Front ends inherit that it is ignored.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    clock = StartUpClock()
    check_model_name(args.model)  # first, so that a wrong name is an error before anything starts
    ssl_context = make_ssl_context(settings)
    listener = Listener(settings)
    place = StorePlace(settings)
    settings = place.settings
    try:
        settings = settings if listener.port is None else replace(settings, port=listener.port)
        clock.mark("listening")
        warn_if_open(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if settings.api_server_count == 1:
                code = runner.run(_serve(settings, args, listener, ssl_context, clock, terminal))
            else:
                # a server with one front end does not need this module
                supervisor = importlib.import_module("inflight.entrypoints.serve.supervisor")
                code = runner.run(supervisor.supervise(settings, args, listener, clock, terminal))
            # all child processes have ended
            listener.close()
            place.close()
            exit_now(code)
    finally:
        listener.close()
        place.close()


def warn_if_open(settings: ServerSettings) -> None:
    """Log a warning if other machines can reach a server that asks for no key."""
    if not settings.is_local and not settings.asks_for_key and settings.ssl_ca_certs is None:
        logger.warning(
            "%s answers everybody who can reach it: give --api-key-file, or listen on 127.0.0.1 only", settings.url
        )


async def _serve(
    settings: ServerSettings,
    args: EngineArgs,
    listener: Listener,
    ssl_context: ssl.SSLContext | None,
    clock: StartUpClock,
    terminal: ServerTerminal,
) -> int:
    async def start() -> ServedModel:
        # imported in a thread, so that /live is answered during the import
        engine_start = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_start")
        clock.mark("importing")
        model: ServedModel = await engine_start.start(settings, args, clock)
        logger.info("ready: %s serves %s, after %s", settings.url, model.description, clock.summary())
        return model

    shutdown = Shutdown(settings.shutdown_timeout)
    with shutdown.on_signals():
        return await Server(settings, ssl_context, start, shutdown, terminal=terminal).run(listener.socket)
