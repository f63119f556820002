"""Connects ranks on other nodes to node 0. Each opens a TCP connection. First both sides prove that they know the cluster's
token, which is never sent (inflight/handshake.py), then the rank sends a `Hello`. A rank that Ray has started has a token of
its own, which is valid once.

Node 0 has a `RankAcceptor` in the executor's I/O thread. The other nodes call `connect`. In the same way replicas on other
machines join the server that has the front ends (engine/process/remote_replica.py). Nothing that a peer sends is decoded before
it has proved the token, and a rank obeys nobody who has not. The size of a hello is limited. Messages are not encrypted, so
nobody else must have access to the network between the nodes.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial

from inflight.config.engine import ParallelConfig
from inflight.counted_warning import CountedWarning
from inflight.errors import CodecError, ConfigError, EngineError
from inflight.handshake import Acceptance, ImpostorError, RefusedError, introduce
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
# rank proves the token, and sends its `Hello`, at once.
MAX_STRANGERS = 256
RETRY_SECONDS = 0.5
# The kernel waits longer and longer between the packets of one try. So a new try is made after this time.
CONNECT_SECONDS = 2.0
_PURPOSE = b"join"  # of the handshake, in which a peer says which rank or replica it is
_RANK_BYTES = 4


class Unproven:
    """A connection whose peer has not proved the token yet. Used in the I/O thread.

    Args:
        decide: called with the answer of the peer when it is complete. The socket is the callee's then.
        on_end: called with the reason if the connection ends before.
    """

    def __init__(
        self,
        io: IoThread,
        connected: socket.socket,
        decide: Callable[[Acceptance], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._io, self._socket, self._decide, self._on_end = io, connected, decide, on_end
        self._acceptance = Acceptance(_PURPOSE, _RANK_BYTES)
        connected.setblocking(False)
        io.loop.add_reader(connected, self._read)

    def greet(self) -> None:
        try:
            self._socket.sendall(self._acceptance.greeting)  # a new connection has room for it
        except OSError as error:
            self._on_end(f"its stream was lost: {error.strerror or error}")

    def take(self) -> socket.socket:
        """Returns the socket, which belongs to the caller now."""
        self._io.loop.remove_reader(self._socket)
        return self._socket

    def close(self) -> None:
        if not self._io.loop.is_closed():
            self._io.loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        try:
            received = self._socket.recv(self._acceptance.num_missing)
        except BlockingIOError:
            return
        except OSError as error:
            self._on_end(f"its stream was lost: {error.strerror or error}")
            return
        self._acceptance.add(received)
        if not received:
            self._on_end("it closed its stream before it had proved that it knows the token")
        elif not self._acceptance.num_missing:
            self._decide(self._acceptance)


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
        # the oldest first; the timer drops it
        self._strangers: dict[Unproven | IoStream, asyncio.TimerHandle] = {}
        self._warning = CountedWarning(logger)
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
            self._warning.log("a connection could not be accepted: %s", error)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)), "a stranger", "too many connections have sent no Hello")
        use_heartbeats(connected, self._max_silence_seconds)
        host = str(peer[0]) if peer else "this machine"
        unproven = Unproven(
            self._io, connected, lambda answer: self._decide(unproven, host, answer), lambda why: end(why)
        )
        end = partial(self._dismiss, unproven, host)
        self._wait(unproven, host)
        unproven.greet()

    def _wait(self, peer: Unproven | IoStream, host: str) -> None:
        no_hello = partial(self._dismiss, peer, host, f"it sent no Hello within {MAX_HELLO_SECONDS:g} s")
        self._strangers[peer] = self._io.loop.call_later(MAX_HELLO_SECONDS, no_hello)

    def _dismiss(self, peer: Unproven | IoStream, host: str, reason: str, *, is_stranger: bool = True) -> None:
        """`is_stranger`: whether the peer has not proved the token, so that its warnings are counted."""
        if (timer := self._strangers.pop(peer, None)) is not None:
            timer.cancel()  # it holds the peer
            warn = self._warning.log if is_stranger else logger.warning
            warn("a connection from %s was dropped: %s", host, reason)
            peer.close()

    def _decide(self, unproven: Unproven, host: str, answer: Acceptance) -> None:
        """The peer has said which rank it is, with its proof."""
        who, verdict = answer.judge(lambda rank: self._tokens.get(int.from_bytes(rank), self._token).encode())
        self._strangers.pop(unproven).cancel()
        connected = unproven.take()
        stream = IoStream(self._io, connected, allowed=(self.hello,), max_frame_bytes=self.max_hello_bytes)
        stream.send([verdict])
        stream.on_end = partial(self._dismiss, stream, host)
        self._wait(stream, host)
        if who is None:
            self._dismiss(stream, host, f"its INFLIGHT_CLUSTER_TOKEN is not the same as on {self.place}")
        else:
            stream.on_message = partial(self._meet, stream, host, int.from_bytes(who))

    def _meet(self, stream: IoStream, host: str, rank: int, hello: Message) -> None:
        assert isinstance(hello, Hello)
        if hello.rank == rank:
            self._greet(stream, host, hello)
        else:  # it knows the token of this rank only
            self._dismiss(stream, host, f"it proved that it is rank {rank}, but said that it is rank {hello.rank}")

    def _greet(self, stream: IoStream, host: str, hello: Message) -> None:
        assert isinstance(hello, Hello)
        refusal = self._foreign(hello) or self._refusal(hello)
        if refusal:
            stream.send(encode(Refused(reason=refusal)).buffers())
            self._dismiss(stream, host, refusal, is_stranger=False)
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
    address: tuple[str, int] | str, hello: Hello, token: str, *, max_seconds: float, place: str = "node 0"
) -> socket.socket:
    """Connect to `place` as the rank or replica of `hello`, and wait if it is not started yet. Returns the connected socket.
    `address`: a host and a port, or the name of a Unix socket. `token`: the secret that both sides know.

    Raises:
        ConfigError: the rank or replica was refused; the message contains the reason. Or the other side has another token.
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
    connected.settimeout(MAX_HELLO_SECONDS)
    advice = "set the same value on all nodes"
    try:
        introduce(connected, _PURPOSE, hello.rank.to_bytes(_RANK_BYTES), token.encode())
    except RefusedError:
        connected.close()
        reason = f"its INFLIGHT_CLUSTER_TOKEN is not the same as on {place}; {advice}"
        raise ConfigError(f"{place} ({name}) refused {who}: {reason}") from None
    except (OSError, ImpostorError) as error:
        connected.close()
        raise EngineError(f"the program that answers on {name} is not {place} of Inflight: {error}") from error
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
