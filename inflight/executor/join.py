"""Connects ranks on other nodes to node 0. Each opens a TCP connection and first sends a `Hello` with the cluster's token. A
rank that Ray has started has a token of its own, which is valid once.

Node 0 has a `RankAcceptor` in the executor's I/O thread. The other nodes call `connect`. In the same way replicas on other
machines join the server that has the front ends (engine/process/remote_replica.py). The token is compared in constant time. A
peer without the right token gets a `Refused`, and nothing else that it sends is decoded. The size of a hello is limited.
Messages are not encrypted, so nobody else must have access to the network between the nodes.
"""

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Callable
from functools import partial

from inflight.config.engine import ParallelConfig
from inflight.errors import CodecError, ConfigError, EngineError
from inflight.interface.codec import MESSAGE_TYPES, Message, encode, schema_digest
from inflight.interface.framing import MAX_FRAME_BYTES
from inflight.interface.start_up import Hello, Refused, ReplicaHello, Welcome
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import BlockingStream, IoStream, use_heartbeats
from inflight.sockets import connect_locally, listen, listen_locally, shown

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 4096
MAX_HELLO_SECONDS = 10.0
# At most this many connections may be open that have not sent a valid `Hello`. If another one comes, the oldest is dropped: a
# rank sends its `Hello` at once.
MAX_STRANGERS = 256
RETRY_SECONDS = 0.5
# The kernel waits longer and longer between the packets of one try. So a new try is made after this time.
CONNECT_SECONDS = 2.0


class RankAcceptor:
    """Accepts one connection for each expected rank, until `close`. All methods except the constructor run in the I/O thread.

    Args:
        address: where it listens. Port 0 means any free port.
        local_name: if not "", it also listens at the Unix socket of this name, for ranks of this machine.
        token: the token of all ranks that have none of their own.
        max_silence_seconds: a link that is silent for longer is closed.
        on_join: called for each rank that connects, with the rank and its stream.

    Raises:
        ConfigError: node 0 cannot listen on the address.
    """

    hello: type[Hello] = Hello  # the class of the first message
    max_hello_bytes = MAX_HELLO_BYTES
    # how messages call this process, and the options of `address`
    place, options = "node 0", "master_addr, master_port"

    def __init__(
        self,
        io: IoThread,
        address: tuple[str, int],
        local_name: str,
        parallel: ParallelConfig,
        token: str,
        max_silence_seconds: float,
        on_join: Callable[[int, IoStream], None],
    ) -> None:
        self._io = io
        self._token = token
        self._world_size, self._nnodes = parallel.world_size, parallel.nnodes
        self._tokens: dict[int, str] = {}  # of all ranks that were ever expected
        self._missing: set[int] = set()
        self._max_silence_seconds = max_silence_seconds
        self._on_join = on_join
        self._strangers: dict[IoStream, asyncio.TimerHandle] = {}  # the oldest first; the timer drops it
        try:
            self._sockets = [listen(*address)]
        except OSError as error:
            raise ConfigError(
                f"{self.place} cannot listen on {shown(*address)} ({self.options}): {error.strerror or error}; choose "
                "an address of this machine and a free port"
            ) from error
        if local_name:
            self._sockets.append(listen_locally(local_name))
        host, port = self._sockets[0].getsockname()[:2]
        self.address = str(host), int(port)

    def start(self) -> None:
        for listening in self._sockets:
            listening.setblocking(False)
            self._io.loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        for listening in self._sockets:
            if not self._io.loop.is_closed():
                self._io.loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()
        for stream in self._strangers:
            stream.close()
        self._strangers.clear()

    def expect(self, rank: int, token: str = "") -> None:
        """Accept one connection of this rank, which has none now. `token`: its own token; "": it has the token of all ranks."""
        self._tokens[rank] = token or self._token
        self._missing.add(rank)

    @property
    def missing(self) -> set[int]:
        """The expected ranks that have not joined yet."""
        return set(self._missing)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected, peer = listening.accept()
        except OSError as error:  # the peer has already left, or this process has no free descriptor
            logger.warning("a connection could not be accepted: %s", error)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)), "a stranger", "too many connections have sent no Hello")
        use_heartbeats(connected, self._max_silence_seconds)
        host = str(peer[0]) if peer else "this machine"
        stream = IoStream(self._io, connected, allowed=(self.hello,), max_frame_bytes=self.max_hello_bytes)
        stream.on_message = partial(self._greet, stream, host)
        stream.on_end = partial(self._dismiss, stream, host)
        no_hello = partial(self._dismiss, stream, host, f"it sent no Hello within {MAX_HELLO_SECONDS:g} s")
        self._strangers[stream] = self._io.loop.call_later(MAX_HELLO_SECONDS, no_hello)

    def _dismiss(self, stream: IoStream, host: str, reason: str) -> None:
        if (timer := self._strangers.pop(stream, None)) is not None:
            timer.cancel()  # it holds the stream
            logger.warning("a connection from %s was dropped: %s", host, reason)
            stream.close()

    def _greet(self, stream: IoStream, host: str, hello: Message) -> None:
        assert isinstance(hello, Hello)
        refusal = self._foreign(hello) or self._refusal(hello)
        if refusal:
            stream.send(encode(Refused(reason=refusal)).buffers())
            self._dismiss(stream, host, refusal)
            return
        self._strangers.pop(stream).cancel()
        stream.send(encode(Welcome(max_silence_seconds=self._max_silence_seconds)).buffers())
        self._join(hello, stream, host)

    def _join(self, hello: Hello, stream: IoStream, host: str) -> None:
        self._missing.remove(hello.rank)
        stream.allowed = MESSAGE_TYPES
        stream.allow_frames_of(MAX_FRAME_BYTES)
        self._on_join(hello.rank, stream)

    def _foreign(self, hello: Hello) -> str:
        """Returns why the peer does not belong to this cluster, or "" if it does."""
        token = self._tokens.get(hello.rank, self._token)
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            return f"its INFLIGHT_CLUSTER_TOKEN is not the same as on {self.place}; set the same value on all nodes"
        if hello.schema != schema_digest():
            return f"it runs another version of Inflight than {self.place}; install the same version on all nodes"
        return ""

    def _refusal(self, hello: Hello) -> str:
        """Returns why this peer may not join, or "" if it may."""
        if (hello.world_size, hello.nnodes) != (self._world_size, self._nnodes):
            return (
                f"it was started for {hello.world_size} ranks on {hello.nnodes} nodes, but node 0 for {self._world_size} ranks "
                f"on {self._nnodes} nodes; use the same parallel sizes and --nnodes on all nodes"
            )
        if hello.rank not in self._tokens:
            return f"rank {hello.rank} does not belong to a node other than node 0; check the --node-rank"
        if hello.rank not in self._missing:
            return f"rank {hello.rank} has joined before, and lives; give each node a --node-rank of its own"
        return ""


def connect(
    address: tuple[str, int] | str, hello: Hello, *, max_seconds: float, place: str = "node 0"
) -> socket.socket:
    """Connect to `place` as the rank or replica of `hello`, and wait if it is not started yet. Returns the connected socket.
    `address`: a host and a port, or the name of a Unix socket.

    Raises:
        ConfigError: the rank or replica was refused; the message contains the reason.
        EngineError: `place` did not answer within `max_seconds`.
    """
    who = f"{'replica' if isinstance(hello, ReplicaHello) else 'rank'} {hello.rank}"
    name = address if isinstance(address, str) else shown(*address)
    end = time.monotonic() + max_seconds
    while True:
        try:
            if isinstance(address, str):
                connected = connect_locally(address)
            else:
                connected = socket.create_connection(address, timeout=CONNECT_SECONDS)
            break
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > end:
                raise EngineError(
                    f"{place} did not answer on {name} within {max_seconds:g} s: {error}; check that it runs there"
                ) from error
        time.sleep(RETRY_SECONDS)
    stream = BlockingStream(connected, read_ahead=False)  # later messages are for the worker process
    connected.settimeout(MAX_HELLO_SECONDS)
    try:
        stream.send(hello)
        answer = stream.receive()
    except (OSError, CodecError) as error:
        stream.close()
        raise EngineError(f"the program that answers on {name} is not {place} of Inflight: {error}") from error
    if isinstance(answer, Welcome):
        use_heartbeats(connected, answer.max_silence_seconds)
        return connected
    stream.close()
    if isinstance(answer, Refused):
        raise ConfigError(f"{place} ({name}) refused {who}: {answer.reason}")
    raise EngineError(f"{place} ({name}) closed the connection of {who}; the log of {place} may say why")
