"""The instruction sets whose C++ kernels can be used here. None without a compiler, or on another processor."""

from __future__ import annotations

from inflight.kernels.cpu.library import INSTRUCTION_SETS, KernelsUnavailableError, open_kernels


def _usable(name: str) -> bool:
    try:
        open_kernels(name)
    except KernelsUnavailableError:
        return False
    return True


INSTRUCTION_SETS_HERE = [name for name in INSTRUCTION_SETS if _usable(name)]
