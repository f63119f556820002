"""Byte streams between an executor and its workers. The executor uses an `IoStream`, the worker a `BlockingStream`.

There is one stream per rank: a socket pair on one machine, TCP between machines. The executor's `IoThread` reads and writes all
`IoStream`s. It reads and writes a bounded number of bytes at a time, so a rank that does not read, or a message of a gigabyte,
does not delay the others. If a stream ends, its peer is gone. On TCP the kernel probes the link (keep-alive), and ends the
stream if the link is broken. Nothing polls.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from inflight.errors import CodecError
from inflight.interface.codec import MESSAGE_TYPES, Decoder, Message, encode
from inflight.interface.framing import MAX_FRAME_BYTES, Buffer, Frame, FrameReader
from inflight.processes.io_thread import IoThread
from inflight.sockets import socket_pair

logger = logging.getLogger(__name__)

MAX_BUFFERS_PER_CALL = 512  # for one call of sendmsg; the kernel allows 1024
# A TCP link that is silent for this long is broken. If the time allowed for a step is shorter, it is used instead.
MAX_LINK_SILENCE_SECONDS = 60.0
# The same if a lost rank is replaced: a new connection comes sooner than the old one repeats packets.
REPLACED_LINK_SILENCE_SECONDS = 15.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER for no time
EXIT_STREAM_ENDED = 3  # exit code of a worker whose executor is gone

P = TypeVar("P")


def use_heartbeats(tcp_socket: socket.socket, max_silence_seconds: float) -> None:
    """Make the kernel probe the link every second. If no answer comes for `max_silence_seconds` (at least 1 s),
    the kernel ends the stream.

    The kernel sends and answers the probes, so a process that is busy, or holds the GIL, is not mistaken for dead. But if a
    process does not read, and its receive buffer is full, the kernel ends the stream after this time, although the probes are
    answered (TCP_USER_TIMEOUT in tcp(7)). So no process may stop reading for this long. A Unix socket needs no probes.
    """
    if tcp_socket.family == socket.AF_UNIX:
        return
    seconds = max(round(max_silence_seconds), 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds)
    # how long sent data may stay unconfirmed
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


class IoStream:
    """The executor's end of one rank's stream. Any thread may call `send`. Other methods must be called in the I/O thread.

    The caller must set `on_message` and `on_end` before the I/O thread handles its next event.

    Attributes:
        on_message: called with each message, in order, in the I/O thread.
        on_end: called once, in the I/O thread, with the reason why the stream has ended: the peer has closed the stream, was
            lost or has sent something damaged, or `on_message` raised.
        allowed: the message types that the peer may send now.
    """

    on_message: Callable[[Message], None]
    on_end: Callable[[str], None]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connected_socket: socket.socket,
        *,
        allowed: Sequence[type] = MESSAGE_TYPES,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.allowed = allowed
        self._loop = loop
        self._socket = connected_socket
        self._socket.setblocking(False)
        self._reader = FrameReader(max_frame_bytes=max_frame_bytes)
        self._decoder = Decoder()
        self._outgoing: deque[Buffer] = deque()
        self._lock = threading.Lock()  # for `_outgoing`, and for the socket while it is written or closed
        self._is_open = True
        loop.add_reader(self._socket, self._read)

    def allow_frames_of(self, num_bytes: int) -> None:
        self._reader.max_frame_bytes = num_bytes

    # -- out -------------------------------------------------------------------------------------------------------

    def send(self, buffers: list[Buffer]) -> None:
        """Send the bytes. Never waits or raises. If the stream is broken, `on_end` is called.

        The calling thread sends the bytes that the socket accepts at once. The I/O thread sends the rest later. Most frames are
        accepted completely, so they need no thread switch.
        """
        with self._lock:
            if not self._is_open:
                return
            was_idle = not self._outgoing
            self._outgoing.extend(buffers)
            if was_idle:
                self._write()
                if self._outgoing:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._write_later)

    def _write(self) -> None:
        """Call sendmsg once. The caller must hold the lock."""
        try:
            count = self._socket.sendmsg(list(islice(self._outgoing, MAX_BUFFERS_PER_CALL)))
        except BlockingIOError:
            return
        except OSError:  # the peer is gone, so `_read` will find the end of the stream
            self._outgoing.clear()
            return
        _drop_sent(self._outgoing, count)

    def _write_later(self) -> None:
        """In the I/O thread, write whenever the socket accepts bytes, until all bytes are sent."""
        if self._is_open:
            self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        with self._lock:
            self._write()
            if not self._outgoing:
                self._loop.remove_writer(self._socket)

    # -- in, in the I/O thread -----------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read once from the socket. Returns whether there may be more to read."""
        try:
            count = self._socket.recv_into(self._reader.buffer())
            if count == 0:
                self._end("it closed its stream")
                return False
            for frame in self._reader.received(count):
                if self._is_open:  # `on_message` may have closed the stream
                    self.on_message(self._decoder.decode(frame, self.allowed))
        except BlockingIOError:
            return False
        except CodecError as error:
            self._end(f"it sent a damaged frame: {error}")
        except OSError as error:
            self._end(f"its stream was lost: {error.strerror or error}")
        except Exception as error:  # a defect: end the stream, so that the executor notices it
            logger.exception("a received message could not be processed, so its stream is closed")
            self._end(f"its message cannot be processed: {error!r}")
        return self._is_open

    def detach(self) -> socket.socket:
        """Returns the socket, which belongs to the caller now. Nothing may be waiting to be sent. What the peer has sent after
        the last message that it was allowed to send is lost."""
        taken = self._socket.dup()
        self.close()
        return taken

    def drain(self) -> None:
        """Read and deliver everything that the peer sent before it died."""
        while self._is_open and self._read():
            pass

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self.on_end(reason)

    def abort(self) -> None:
        """Close the stream, and reset a TCP link. If the link is broken now, the kernel does not try to send what is left. When
        the link is back, the next packet of the peer is answered by a reset, so the peer ends at once."""
        with self._lock:
            if self._is_open:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def close(self) -> None:
        """Close the stream without calling `on_end`. Idempotent. When the I/O thread has ended, any thread may call this."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._outgoing.clear()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()


def with_stream(io: IoThread, start: Callable[[int], P]) -> tuple[P, IoStream]:
    """Start a process that has the other end of a new stream. `start`: gets the descriptor of this end. Called in the I/O
    thread."""
    with socket_pair() as (ours, theirs):
        process = start(theirs.fileno())
    return process, IoStream(io.loop, ours)


class BlockingStream:
    """The worker's end of the stream. One thread may receive. Any thread may send, and waits until the kernel has all bytes.

    With `read_ahead=False`, the bytes after a received message remain in the socket, for another reader.
    """

    def __init__(self, connected_socket: socket.socket, *, read_ahead: bool = True) -> None:
        self._socket = connected_socket
        self._socket.setblocking(True)
        self._reader = FrameReader(read_ahead=read_ahead)
        self._decoder = Decoder()
        self._frames: deque[Frame] = deque()
        self._lock = threading.Lock()  # held while one frame is sent

    def receive(self, allowed: Sequence[type] = MESSAGE_TYPES) -> Message | None:
        """Returns the next message, or None at the end of the stream.

        Raises:
            CodecError: the message is damaged, or its type is not in `allowed`.
            OSError: the stream was lost.
        """
        while not self._frames:
            count = self._socket.recv_into(self._reader.buffer())
            if count == 0:
                return None
            self._frames.extend(self._reader.received(count))
        return self._decoder.decode(self._frames.popleft(), allowed)

    def send(self, message: Message) -> None:
        """
        Raises:
            CodecError: the message cannot be encoded. Nothing was sent.
            OSError: the stream was lost.
        """
        buffers = deque(encode(message).buffers())
        with self._lock:
            while buffers:
                _drop_sent(buffers, self._socket.sendmsg(list(islice(buffers, MAX_BUFFERS_PER_CALL))))

    def close(self) -> None:
        self._socket.close()


def _drop_sent(buffers: deque[Buffer], count: int) -> None:
    """Remove the first `count` bytes from `buffers`."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.popleft())
    if count:
        buffers[0] = memoryview(buffers[0])[count:]
