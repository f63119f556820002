"""Finds the executor class that `distributed_executor_backend` names, and imports only what this class needs."""

from __future__ import annotations

import importlib

from inflight.errors import ConfigError
from inflight.executor.executor import Executor


def executor_class(backend: str) -> type[Executor]:
    """Returns the class for `backend`: "uni", "mp", "external_launcher", or "package.module:ClassName".

    Raises:
        ConfigError: the class cannot be imported, or it is not a subclass of `Executor`.
    """
    if backend == "uni":
        from inflight.executor.uniproc import UniProcExecutor

        return UniProcExecutor
    if backend == "mp":
        from inflight.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor
    if backend == "external_launcher":
        from inflight.executor.external_launcher import ExternalLauncherExecutor

        return ExternalLauncherExecutor
    module, _, class_name = backend.partition(":")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # any exception that the module raises while it is imported
        raise ConfigError(
            f"distributed_executor_backend={backend!r} cannot be imported: {type(error).__name__}: {error}; allowed are uni, "
            "mp, external_launcher, or package.module:ClassName"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(
            f"distributed_executor_backend={backend!r} must be a subclass of inflight.executor.executor.Executor"
        )
    return found
