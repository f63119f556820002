"""`EventBuffer`: reads server-sent events."""

from collections.abc import Iterator


class EventBuffer:
    """Joins the pieces of data that the network delivers into server-sent events. The time is linear in the data.

    Lines may end in LF or CRLF. Comments and fields other than `data` are ignored (HTML standard, section 9.2)."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[bytes] = []  # data lines of the event that has not ended yet

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Add a piece. Yields the data of each event that is complete now."""
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
