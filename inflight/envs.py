"""Environment variables, read in one place. Each is a function: tests may change the environment at run time."""

from __future__ import annotations

import os

from inflight.errors import ConfigError


def execute_model_timeout_seconds() -> float:
    """Budget of one step in seconds: `INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS`, or vLLM's name for it; default 60."""
    for name in ("INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"):
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ConfigError(f"{name}={text!r} is not a positive number of seconds")
        return seconds
    return 60.0


def cluster_token() -> str:
    """`INFLIGHT_CLUSTER_TOKEN`: the secret that the nodes of one engine share.

    Raises:
        ConfigError: it is not set. There is no default: whoever knows the token can run code on the nodes.
    """
    token = os.environ.get("INFLIGHT_CLUSTER_TOKEN", "")
    if not token:
        raise ConfigError(
            "several nodes need a shared secret: set INFLIGHT_CLUSTER_TOKEN to the same long random text on every node"
        )
    return token


def log_level() -> str:
    """`INFLIGHT_LOG_LEVEL`: DEBUG, INFO, WARNING (the default) or ERROR."""
    level = os.environ.get("INFLIGHT_LOG_LEVEL", "WARNING").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"INFLIGHT_LOG_LEVEL={level!r} is not one of DEBUG, INFO, WARNING, ERROR")
    return level


def cpu_kernels() -> str:
    """`INFLIGHT_CPU_KERNELS`: "auto" (the default), "off" for plain torch, or the instruction set to use."""
    return os.environ.get("INFLIGHT_CPU_KERNELS", "auto")


def require_kernels() -> bool:
    """`INFLIGHT_REQUIRE_KERNELS=1`: it is an error if the C++ kernels cannot be used (or, in an install, not be built)."""
    return os.environ.get("INFLIGHT_REQUIRE_KERNELS") == "1"
