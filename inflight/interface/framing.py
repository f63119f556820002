"""Frames of a byte stream: how a message is laid out in bytes, and `FrameReader`, which finds the frames in received bytes.

    | magic 4s | kind u8 | 0 | num_segments u16 | body_size u32 | segment sizes u64 ... | body | segment | segment ...

A frame has a header, a body (the encoded message), and for each large array a segment with the array's bytes. The sender sends
a segment from the memory of its array. The receiver reads a segment of READ_AHEAD_BYTES or more directly into the memory of a
new array. Numbers are little-endian. This file opens no sockets.
"""

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.errors import CodecError

MAX_FRAME_BYTES = 2**30  # the most bytes of body and segments together
MAX_SEGMENTS = 2**16 - 1
READ_AHEAD_BYTES = 2**16

_MAGIC = b"InFl"
_HEADER = struct.Struct("<4sBxHI")

ByteArray = npt.NDArray[np.uint8]
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on the wire. The codec chooses by `kind` how to read `body`. Each segment is one-dimensional."""

    kind: int
    body: bytes | bytearray
    segments: Sequence[ByteArray] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(segment) for segment in self.segments)

    def buffers(self) -> list[Buffer]:
        """Returns the frame's bytes, in order, for `sendmsg`. The buffers must not change until they are sent.

        Raises:
            CodecError: the frame is larger than a reader accepts.
        """
        if self.num_bytes > MAX_FRAME_BYTES or len(self.segments) > MAX_SEGMENTS:
            raise CodecError(
                f"a message of {self.num_bytes} bytes with {len(self.segments)} large arrays is more than a frame holds "
                f"({MAX_FRAME_BYTES} bytes, {MAX_SEGMENTS} arrays); send it as several messages"
            )
        sizes = [len(segment) for segment in self.segments]
        lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
        header = _HEADER.pack(_MAGIC, self.kind, len(sizes), len(self.body)) + lengths
        return [header + self.body, *(segment.data for segment in self.segments if len(segment))]


class FrameReader:
    """Makes frames from the bytes of a stream. The caller fills the memory that `buffer()` returns, and then calls `received()`
    with the number of bytes.

    Many small frames can be read at once, through one buffer. A large body or segment is read directly into its final memory.
    With `read_ahead=False` the reader never reads beyond the current frame, so another reader can read the next frame.

    Raises (`received`):
        CodecError: the bytes are not a valid frame, or the frame is larger than `max_frame_bytes`. The stream cannot be used
            after this error, because the start of the next frame is not known.
    """

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES, read_ahead: bool = True) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES if read_ahead else 0))
        self._pieces = self._read_frame()  # yields the pieces of the current frame: memory to be filled in this order
        self._piece = next(self._pieces)
        self._filled = 0  # how many bytes of the current piece have been received
        self._in_place = False  # whether `buffer()` has returned memory of the piece itself

    def buffer(self) -> memoryview:
        """Returns the memory for the next bytes. It is never empty."""
        rest = self._piece[self._filled :]
        self._in_place = len(rest) >= len(self._ahead)
        return rest if self._in_place else self._ahead

    def received(self, count: int) -> list[Frame]:
        """Call this when the first `count` bytes of `buffer()` have been filled. Returns the frames that are complete now."""
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
        """Yields memory for each piece of one frame: header, sizes, body, segments. The caller fills a piece before it asks for
        the next piece."""
        header = bytearray(_HEADER.size)
        yield memoryview(header)
        magic, kind, num_segments, body_size = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise CodecError(f"a frame begins with {magic!r}, not {_MAGIC!r}: the peer does not speak our protocol")
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
            raise CodecError(f"a frame has {num_bytes} bytes; at most {self.max_frame_bytes} are allowed")
