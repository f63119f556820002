"""Terminal input and output: `CompletionPrinter` shows completions while they grow, `InterruptFlag` handles Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Self, TextIO

from inflight.logs import escape_controls
from inflight.outputs import RequestOutput


def write_text(file: TextIO, text: str) -> None:
    """Write text of a model or a server. A terminal shows its control characters as text, because they could otherwise clear
    the screen or write the clipboard."""
    file.write(escape_controls(text) if file.isatty() else text)


class TextStream:
    """Writes a text that only grows. Each call of `update` writes the part that is new."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._num_written = 0

    def update(self, text: str) -> None:
        if len(text) > self._num_written:
            write_text(self._file, text[self._num_written :])
            self._file.flush()
            self._num_written = len(text)


class CompletionPrinter:
    """Prints the completions of several prompts in the order of the prompts, even if completions of later prompts end first.

    If a prompt has one completion, the completion is printed while it grows. If there are several prompts, each prompt is
    printed before its completions.
    """

    def __init__(self, file: TextIO, prompts: Sequence[str]) -> None:
        self._file = file
        self._prompts = prompts
        # prompt index -> newest output, until all of the prompt is printed
        self._outputs: dict[int, RequestOutput] = {}
        self._turn = 0  # the index of the prompt whose completions are printed now
        self._stream: TextStream | None = None

    def update(self, index: int, output: RequestOutput) -> None:
        """`index` is the index of the prompt. `output` has the whole texts of the completions so far."""
        self._outputs[index] = output
        while (current := self._outputs.get(self._turn)) is not None:
            if len(current.outputs) == 1:
                self._stream_text(current.outputs[0].text)
            if not current.finished:
                return
            if len(current.outputs) > 1:
                self._header()
                for completion in current.outputs:
                    write_text(self._file, f"[{completion.index}] {completion.text}\n")
            else:
                self._file.write("\n")
            self._file.flush()
            del self._outputs[self._turn]
            self._turn, self._stream = self._turn + 1, None

    def _stream_text(self, text: str) -> None:
        if self._stream is None:
            self._header()
            self._stream = TextStream(self._file)
        self._stream.update(text)

    def _header(self) -> None:
        if len(self._prompts) > 1:
            gap = "" if self._turn == 0 else "\n"
            self._file.write(f"{gap}> {self._prompts[self._turn]}\n")


class InterruptFlag:
    """A context manager. In its `with` block the first SIGINT sets `is_set`, so that a loop can stop between two steps. Each
    further SIGINT raises KeyboardInterrupt, as usual."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: signal._HANDLER = None
        # Python allows signal handlers only in the main thread.
        self._can_handle = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        self.is_set = False
        if self._can_handle:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._can_handle:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed. Some daemons start commands with closed standard streams.

    If a stream stayed closed, the next file or socket would get its descriptor, and child processes would write to this file or
    socket.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  stays open until the process ends
