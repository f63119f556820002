"""`run_router`: runs a server with several models after the options of `inflight serve` have been checked."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import uvloop

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.response_store.place import StorePlace
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.router.app import RouterApp
from inflight.entrypoints.router.catalog import Catalog
from inflight.entrypoints.router.loaded_models import LoadedModels
from inflight.entrypoints.router.model_settings import settings_of_model
from inflight.entrypoints.router.presets import ALL, Preset
from inflight.entrypoints.serve.command import warn_if_open
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import Server
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import END_SECONDS, Shutdown
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.errors import ConfigError, put_place_before
from inflight.logs import exit_now

logger = logging.getLogger(__name__)


class _NoMetrics:
    """Counts nothing: the models' own servers count their requests."""

    def http_request(self, route: str, status: int, seconds: float) -> None: ...

    def request_refused(self, reason: str) -> None: ...

    def engine_died(self) -> None: ...


@dataclass(frozen=True)
class ServedModels:
    """What the `Server` serves."""

    engine: LoadedModels
    app: RouterApp
    metrics: _NoMetrics

    async def close(self) -> None:
        await self.engine.close()


def make_catalog(settings: ServerSettings, presets: Mapping[str, Preset]) -> Catalog:
    """
    Raises:
        ConfigError: `models_dir` is not a folder, or more models are loaded at the start or pinned than `models_max` allows.
    """
    first = [name for name, preset in presets.items() if name != ALL and (preset.loads_on_startup or preset.is_pinned)]
    if len(first) > settings.models_max:
        raise ConfigError(
            f"models_max={settings.models_max} is less than the {len(first)} models that the preset file loads at the start or "
            f"pins: {', '.join(first)}"
        )
    folder = None if settings.models_dir is None else Path(os.path.expanduser(settings.models_dir))
    has_cache = folder is None or settings.enable_model_management
    return Catalog(folder, dict(presets), has_cache=has_cache)


def settings_of_models(
    settings: ServerSettings, args: EngineArgs, presets: Mapping[str, Preset], is_fixed: Callable[[str], bool]
) -> dict[str, EngineArgs]:
    """The name of each model -> the settings of its engine. The arguments are those of `run_router`.

    Raises:
        ConfigError: a preset does not fit the other settings. The message names the model.
    """
    found = {}
    for name, known in make_catalog(settings, presets).models().items():
        try:
            _, found[name] = settings_of_model(settings, args, is_fixed, known, "/inflight.sock")
        except ConfigError as error:
            put_place_before(error, name)
            raise
    return found


def run_router(
    settings: ServerSettings, args: EngineArgs, presets: Mapping[str, Preset], is_fixed: Callable[[str], bool]
) -> NoReturn:
    """Serve until a signal comes, and then end the process. Call it in the main thread.

    Args:
        presets, is_fixed: see `Catalog` and `LoadedModels`.

    Raises:
        ConfigError: the address, a file or the folder cannot be used.
    """
    terminal = ServerTerminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until a handler is installed
    catalog = make_catalog(settings, presets)
    ssl_context = make_ssl_context(settings)
    listener = Listener(settings)
    place = StorePlace(settings)
    settings = place.settings
    try:
        settings = settings if listener.port is None else replace(settings, port=listener.port)
        warn_if_open(settings)

        async def serve() -> int:
            models = LoadedModels(settings, args, is_fixed)

            async def start() -> ServedModels:
                known = await asyncio.to_thread(catalog.models)
                app = RouterApp(
                    catalog,
                    models,
                    StoredResponses(settings),
                    may_manage=settings.enable_model_management,
                    allowed_origins=settings.allowed_origins,
                )
                models.start_looking()
                for each in known.values():
                    if each.preset.loads_on_startup:
                        models.begin_loading(models.slot(each))
                logger.info("ready: %s serves %d models, each loaded by its first request", settings.url, len(known))
                return ServedModels(models, app, _NoMetrics())

            # the models' servers have END_SECONDS to end; after that this process has the same time
            shutdown = Shutdown(settings.shutdown_timeout, 2 * END_SECONDS)
            with shutdown.on_signals():
                return await Server(settings, ssl_context, start, shutdown, terminal=terminal).run(listener.socket)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve())
        listener.close()
        place.close()
        exit_now(code)
    finally:
        listener.close()
        place.close()
