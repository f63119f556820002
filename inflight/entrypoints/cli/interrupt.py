"""`InterruptFlag`: Ctrl-C asks to stop between two steps instead of tearing one apart."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class InterruptFlag:
    """While it is entered, the first SIGINT sets `is_set`; a second one raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: signal._HANDLER = None
        self._can_handle = threading.current_thread() is threading.main_thread()  # Python's own condition

    def __enter__(self) -> Self:
        self.is_set = False
        if self._can_handle:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._can_handle:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
