"""The instruction sets whose C++ kernels can be used here. None without a compiler, or on another processor.

If INFLIGHT_TEST_GUEST is "neon=program", it is only this one: the program of tests/support/guest computes the kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

from inflight.kernels.cpu.library import INSTRUCTION_SETS, KernelsUnavailableError, open_kernels
from tests.conftest import FULL
from tests.support.guest import kernels as guest

if given := os.environ.get("INFLIGHT_TEST_GUEST"):
    guest.install(given.partition("=")[0], Path(given.partition("=")[2]))


def _usable(name: str) -> bool:
    try:
        open_kernels(name)
    except KernelsUnavailableError:
        return False
    return True


INSTRUCTION_SETS_HERE = [name for name in INSTRUCTION_SETS if _usable(name)]
# For longer tests: values of `INFLIGHT_CPU_KERNELS`. `make test` runs them with the best set, `make test-full` with each set.
ONE_SET_OR_ALL = (INSTRUCTION_SETS_HERE if FULL else INSTRUCTION_SETS_HERE[:1]) or ["auto"]
