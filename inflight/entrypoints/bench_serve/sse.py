"""`EventBuffer`: server-sent events out of the pieces that the network delivers, in linear time."""

from __future__ import annotations

from collections.abc import Iterator


class EventBuffer:
    """Lines may end in LF or CRLF; comments and fields other than `data` are passed over (HTML standard, section 9.2)."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []  # of an event that has not ended

    def push(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that `piece` completes."""
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self._pieces.append(line)
            whole = b"".join(self._pieces).removesuffix(b"\r")
            self._pieces = []
            if whole.startswith(b"data:"):
                self._data.append(whole[5:].removeprefix(b" "))
            elif not whole and self._data:
                yield b"\n".join(self._data)
                self._data = []
        if rest:
            self._pieces.append(rest)
