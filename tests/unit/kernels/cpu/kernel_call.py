"""`Call`: one call of a C++ kernel, as kernel_calls.py makes it. The sizes that all of them have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from inflight.kernels.cpu.recording import KernelLibrary
from tests.unit.kernels.cpu.guarded_memory import GuardedMemory

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
TORCH_EMPTY = torch.empty
FLOAT32, BFLOAT16, INT8 = torch.float32, torch.bfloat16, torch.int8
FLOATS = (FLOAT32, BFLOAT16)
EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100]  # widths of vectors and panels, and their neighbours
SIZES = list(range(1, 131)) if FULL else EDGES


class Call(NamedTuple):
    name: str
    run: Callable[[], object]
    is_supported: bool = True


class Kernels(NamedTuple):
    library: KernelLibrary
    memory: GuardedMemory
