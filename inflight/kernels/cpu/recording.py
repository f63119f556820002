"""`KernelLibrary`: the library of C++ kernels, whose calls a thread can record, so that a tape can repeat them (tape.py)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Taped(NamedTuple):
    """What a recorder must know of a function: the indices of two arguments."""

    rows: int | None  # the number of rows, or a multiple of it
    out: int | None  # the pointer to the result; None: the function changes its input


TAPED = {  # the functions that a tape may call, in the order of `kFunctions` in tape.cpp
    "inflight_rms_norm": Taped(rows=6, out=5),
    "inflight_norm_and_rotate": Taped(rows=6, out=None),
    "inflight_linear": Taped(rows=6, out=3),
    "inflight_paged_attention": Taped(rows=None, out=6),
    "inflight_select_rows": Taped(rows=4, out=3),
    "inflight_all_reduce": Taped(rows=2, out=None),
    "inflight_all_gather": Taped(rows=3, out=2),
    "inflight_gated_delta": Taped(rows=None, out=2),
    "inflight_multiply_activation": Taped(rows=4, out=None),
    "inflight_add_and_scale": Taped(rows=6, out=None),
    "inflight_short_conv": Taped(rows=None, out=2),
    "inflight_linear_of_heads": Taped(rows=7, out=3),
    "inflight_copy_heads": Taped(rows=6, out=3),
}


class CallRecorder(Protocol):
    def add(self, name: str, arguments: Sequence[Any]) -> None:
        """Called after a function of the library has returned."""


class Recording(threading.local):
    """The recorder of each thread's calls, or None."""

    recorder: CallRecorder | None = None


class KernelLibrary(ctypes.CDLL):
    """The functions of kernels.h. `recording` says who records the calls of a thread."""

    def __init__(self, path: Path, instruction_set: str) -> None:
        super().__init__(str(path))
        self.instruction_set = instruction_set
        self.recording = Recording()


def recordable(recording: Recording, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:  # Any: what ctypes converts
        result = function(*arguments)
        if recording.recorder is not None:
            recording.recorder.add(name, arguments)
        return result

    return call
