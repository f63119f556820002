"""The variables of OpenMP, which runs torch's compute threads and those of the kernels.

OMP_NUM_THREADS and OMP_THREAD_LIMIT are respected. Variables that place threads on cores are ignored, because Inflight places
its compute threads itself (`cpu_threads_bind`): OpenMP would give the same cores to all ranks. So is OMP_DYNAMIC, which lets
OpenMP use fewer threads. OpenMP reads these variables when torch is imported. It then binds the thread that imports torch,
for ever. So the variables are hidden while Inflight imports torch.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger(__name__)

PLACEMENT = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_DYNAMIC")
_OFF = ("", "false", "none", "disabled")  # with these values a variable of `PLACEMENT` changes nothing


def max_threads() -> int | None:
    """The most threads that the variables allow; None if they set no limit. OMP_NUM_THREADS may be a list, with a number for
    each level of nested parallel regions. The first number counts."""
    given = (os.environ.get(name, "").partition(",")[0].strip() for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"))
    return min((int(text) for text in given if text.isdecimal() and int(text) > 0), default=None)


def without_placement(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in PLACEMENT}


@contextmanager
def placement_hidden() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in PLACEMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def tell_ignored() -> None:
    """Log in one line which variables are ignored."""
    names = ", ".join(name for name in PLACEMENT if os.environ.get(name, "").lower() not in _OFF)
    if not names:
        return
    if "torch" in sys.modules:
        cores = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        logger.warning(
            "%s: torch was imported before the engine was made, so OpenMP may have bound this thread; compute threads use only "
            "the cores of this thread (%s): unset these variables, or make the engine before torch is imported",
            names,
            cores,
        )
    else:
        logger.warning("%s: ignored, because cpu_threads_bind places the compute threads", names)
