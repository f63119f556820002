"""Binds the compute threads of a rank to cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from inflight.errors import ConfigError


def bind_threads(kernels: ctypes.CDLL, cores: Sequence[int]) -> None:
    """Thread i of the calling thread's OpenMP pool may run on `cores[i]` only; the calling one, number 0, on any of them.

    While the others work it has its own core all the same. OpenMP may end threads that a smaller region has no use for; those
    that take their place inherit where the calling thread may run, and should not all be on its core.

    Raises:
        ConfigError: the kernel refuses.
    """
    error = kernels.inflight_bind_threads((ctypes.c_int32 * len(cores))(*cores), len(cores))
    if error:
        raise ConfigError(
            f"compute threads cannot be bound to cores {', '.join(map(str, cores))}: {os.strerror(error)}; "
            "set cpu_threads_bind='off'"
        )
    os.sched_setaffinity(0, cores)
