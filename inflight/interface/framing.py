"""Frames of a byte stream: a header, a typed body, and segments with the bytes of large arrays. This file opens no sockets.

    | magic 4s | kind u8 | 0 | num_segments u16 | body_size u32 | segment sizes u64 ... | body | segment | segment ...

A segment is the bytes of one large array. It is sent from the array's memory and received into the memory of the new array, so
nothing is copied. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.errors import CodecError

MAX_FRAME_BYTES = 2**30  # of body and segments together
MAX_SEGMENTS = 2**16 - 1
READ_AHEAD_BYTES = 2**16

_MAGIC = b"InFl"
_HEADER = struct.Struct("<4sBxHI")

ByteArray = npt.NDArray[np.uint8]
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on the wire. `kind` says how the codec reads `body`; `segments` are flat."""

    kind: int
    body: bytes | bytearray
    segments: Sequence[ByteArray] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(segment) for segment in self.segments)

    def buffers(self) -> list[Buffer]:
        """Returns the frame's bytes, in order, for `sendmsg`. They must not change until they are sent.

        Raises:
            CodecError: the frame is larger than a reader accepts.
        """
        if self.num_bytes > MAX_FRAME_BYTES or len(self.segments) > MAX_SEGMENTS:
            raise CodecError(
                f"a message of {self.num_bytes} bytes with {len(self.segments)} large arrays is more than a frame holds "
                f"({MAX_FRAME_BYTES} bytes, {MAX_SEGMENTS} arrays); send it in parts"
            )
        sizes = [len(segment) for segment in self.segments]
        header = _HEADER.pack(_MAGIC, self.kind, len(sizes), len(self.body)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        return [header + self.body, *(segment.data for segment in self.segments if len(segment))]


class FrameReader:
    """Makes frames from the bytes of a stream. The caller fills `buffer()`, and then calls `received()` with the number of
    bytes.

    Small frames are read many at a time through one buffer; a large body or segment is received in place. With
    `read_ahead=False` the reader takes no byte behind the current frame, so that another reader can continue.

    Raises (`received`):
        CodecError: the bytes are not a valid frame, or the frame is larger than `max_frame_bytes`. Then the stream is lost.
    """

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES, read_ahead: bool = True) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES if read_ahead else 0))
        self._pieces = self._read_frame()  # of the current frame
        self._piece = next(self._pieces)
        self._filled = 0  # bytes of the piece
        self._in_place = False

    def buffer(self) -> memoryview:
        """Returns the memory for the next bytes. Never empty."""
        rest = self._piece[self._filled :]
        self._in_place = len(rest) >= len(self._ahead)
        return rest if self._in_place else self._ahead

    def received(self, count: int) -> list[Frame]:
        """The first `count` bytes of `buffer()` have been filled. Returns the frames that are complete now."""
        data = self._ahead[:0] if self._in_place else self._ahead[:count]
        if self._in_place:
            self._filled += count
        frames: list[Frame] = []
        while True:
            taken = min(len(data), len(self._piece) - self._filled)
            self._piece[self._filled : self._filled + taken] = data[:taken]
            self._filled += taken
            data = data[taken:]
            if self._filled < len(self._piece):
                return frames
            try:
                self._piece = next(self._pieces)
            except StopIteration as end:
                frames.append(end.value)
                self._pieces = self._read_frame()
                self._piece = next(self._pieces)
            self._filled = 0

    def _read_frame(self) -> Generator[memoryview, None, Frame]:
        """Yields the pieces of one frame: header, sizes, body, segments. Each is full when the next one is asked for."""
        header = bytearray(_HEADER.size)
        yield memoryview(header)
        magic, kind, num_segments, body_size = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise CodecError(f"a frame begins with {magic!r}: the peer does not speak our protocol")
        self._check_size(body_size + 8 * num_segments)
        packed_sizes = bytearray(8 * num_segments)
        yield memoryview(packed_sizes)
        sizes = struct.unpack(f"<{num_segments}Q", packed_sizes)
        self._check_size(body_size + sum(sizes))
        body = bytearray(body_size)
        yield memoryview(body)
        segments = []
        for size in sizes:
            segment = np.empty(size, dtype=np.uint8)
            yield segment.data
            segments.append(segment)
        return Frame(kind, body, segments)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_frame_bytes:
            raise CodecError(f"a frame of {num_bytes} bytes; at most {self.max_frame_bytes} are allowed")
