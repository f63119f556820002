"""`settings_of_model`: the settings of the server in a model's process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.serve.settings import ServerSettings


def settings_of_model(
    settings: ServerSettings, args: EngineArgs, is_fixed: Callable[[str], bool], known: KnownModel, path: str
) -> tuple[ServerSettings, EngineArgs]:
    """The settings of a model's own server, which listens at `path`.

    Args:
        settings, args: of the router.
        is_fixed: whether a setting was given on the router's command line, which overrides a preset.

    Raises:
        ConfigError: the preset does not fit the other settings.
    """
    preset = known.preset
    own = {name: value for name, value in preset.server.items() if not is_fixed(name)}
    of_the_router: dict[str, Any] = {  # Any: the settings' values
        "root_path": "",
        "api_keys": (),
        "api_key_file": None,
        "admin_api_key": None,
        "ssl_certfile": None,
        "ssl_keyfile": None,
        "ssl_ca_certs": None,
        "allowed_hosts": ("*",),
        "allowed_origins": (),
        "allow_credentials": False,
        "forwarded_allow_ips": "none",
        "access_log": "off",
        "ui": False,
        "models_dir": None,
        "models_preset": None,
        "models_max": ServerSettings.models_max,
        "models_idle_timeout": None,
        "models_spare": ServerSettings.models_spare,
        "enable_model_management": False,
        "response_store": settings.response_store,
    }
    changed = {**own, **of_the_router, "uds": path, "served_model_names": known.names}
    own_settings = replace(settings, **changed)
    engine = {name: value for name, value in preset.engine.items() if not is_fixed(name)}
    return own_settings, replace(args, **{**engine, "model": known.model})
