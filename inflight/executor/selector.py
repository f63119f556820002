"""Finds the executor class that `distributed_executor_backend` names, and imports only what this class needs."""

import importlib
from typing import Any

from inflight.errors import ConfigError

OWN = {
    "uni": "inflight.executor.uniproc:UniProcExecutor",
    "mp": "inflight.executor.multiproc:MultiprocExecutor",
    "ray": "inflight.executor.ray_executor:RayExecutor",
    "external_launcher": "inflight.executor.external_launcher:ExternalLauncherExecutor",
}


def executor_class(backend: str, base: type[Any]) -> type[Any]:
    """Returns the class for `backend`: a key of `OWN`, or "package.module:ClassName".

    Raises:
        ConfigError: the class cannot be imported, or it is not a subclass of `base`.
    """
    module, _, class_name = OWN.get(backend, backend).partition(":")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # any exception that the module raises while it is imported
        raise ConfigError(
            f"distributed_executor_backend={backend!r} cannot be imported: {type(error).__name__}: {error}; allowed are "
            f"{', '.join(OWN)}, or package.module:ClassName"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"distributed_executor_backend={backend!r} must be a subclass of {base.__module__}.{base.__qualname__}"
        )
    return found
