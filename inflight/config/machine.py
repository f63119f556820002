"""`detect_machine`: the facts about this machine that `resolve` needs, found without torch."""

from __future__ import annotations

import os

from inflight import envs
from inflight.config.resolve import Machine


def detect_machine(device: str) -> Machine:
    """`device`: "auto" or "cpu"; `EngineArgs` has refused anything else."""
    assert device in ("auto", "cpu"), device
    # float16 is left out: processors without float16 arithmetic emulate it, slowly
    return Machine(
        device="cpu",
        num_cores=_num_cores(),
        dtypes=("bfloat16", "float32"),
        usable_cores=tuple(sorted(os.sched_getaffinity(0))),
        threads_bind=envs.cpu_threads_bind(),
    )


def _num_cores() -> int:
    """The cores this process may run on, or fewer if OMP_NUM_THREADS says so."""
    cores, limit = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) > 0 else cores
