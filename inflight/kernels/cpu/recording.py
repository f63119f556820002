"""`KernelLibrary`: the library of C++ kernels, whose calls a thread can record, so that a tape can repeat them (tape.py)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


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
