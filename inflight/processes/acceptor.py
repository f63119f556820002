"""How peers on other machines join: ranks join node 0, and replicas join the server that has the front ends.

A peer opens a TCP connection (`connect`). First both sides prove that they know the cluster's token, which is never sent
(inflight/handshake.py), then the peer sends a `Hello`. The other side has an `Acceptor` in an event loop, and a `Gatekeeper`
that says who may join (executor/join.py, engine/process/remote_replica.py). Nothing that a peer sends is decoded before it has
proved the token, and a peer obeys nobody who has not. The size of a hello is limited. Messages are not encrypted, so nobody
else must have access to the network between the machines.
"""

import asyncio
import logging
import math
import socket
import time
from functools import partial
from typing import Protocol

from inflight.counted_warning import CountedWarning
from inflight.errors import CodecError, ConfigError, EngineError
from inflight.handshake import ImpostorError, RefusedError, introduce
from inflight.interface.codec import Message, encode, schema_digest
from inflight.interface.start_up import Hello, Refused, ReplicaHello, Welcome
from inflight.processes.streams import BlockingStream, IoStream, use_heartbeats
from inflight.sockets import connect_locally, listen, listen_locally, shown
from inflight.strangers import Strangers

logger = logging.getLogger(__name__)

MAX_HELLO_SECONDS = 10.0  # for the proof, and then for the `Hello`
RETRY_SECONDS = 0.5
# The kernel waits longer and longer between the packets of one try. So a new try is made after this time.
CONNECT_SECONDS = 2.0
_PURPOSE = b"join"  # of the handshake, in which a peer says which rank or replica it is
_NUMBER_BYTES = 4


class Gatekeeper(Protocol):
    """Who lets peers join. All methods are called in the event loop of the `Acceptor`."""

    @property
    def place(self) -> str:
        """How messages call this process, for example "node 0"."""

    def token_of(self, number: int) -> str:
        """The token of the rank or replica with this number."""

    def seconds_to_wait(self, hello: Hello) -> float:
        """For how long the answer to this peer is to be delayed. Asked again after this time."""

    def refusal(self, hello: Hello) -> str:
        """Returns why this peer may not join, or "" if it may."""

    def join(self, hello: Hello, stream: IoStream, host: str) -> None:
        """The peer has joined, and belongs to the gatekeeper. `host` is its address."""


class Acceptor:
    """Listens for peers, until `close`. All methods except the constructor run in the event loop.

    Args:
        address: where it listens. Port 0 means any free port.
        options: the options that `address` comes from.
        local_name: if not "", it also listens at the Unix socket of this name, for peers of this machine.
        max_silence_seconds: a link that is silent for longer is closed.
        hello: the class of a peer's first message, and the most bytes that this may have.

    Attributes:
        address: where it listens.

    Raises:
        ConfigError: this machine cannot listen on the address.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gatekeeper: Gatekeeper,
        address: tuple[str, int],
        options: str,
        *,
        local_name: str = "",
        max_silence_seconds: float,
        hello: tuple[type[Hello], int],
    ) -> None:
        self._loop = loop
        self._gatekeeper = gatekeeper
        self._max_silence_seconds = max_silence_seconds
        self._hello, self._max_hello_bytes = hello
        self._strangers = Strangers(
            _PURPOSE, _NUMBER_BYTES, lambda who: gatekeeper.token_of(int.from_bytes(who)).encode(), self._record_dropped
        )
        self._drops_late_at = math.inf  # when the strangers that are too late are dropped
        self._proven: dict[IoStream, asyncio.TimerHandle] = {}  # have sent no `Hello` yet; the timer drops them
        self._warning = CountedWarning(logger)
        try:
            self._sockets = [listen(*address)]
        except OSError as error:
            raise ConfigError(
                f"{gatekeeper.place} cannot listen on {shown(*address)} ({options}): {error.strerror or error}; choose "
                "an address of this machine and a free port"
            ) from error
        if local_name:
            self._sockets.append(listen_locally(local_name))
        host, port = self._sockets[0].getsockname()[:2]
        self.address = str(host), int(port)

    def start(self) -> None:
        for listening in self._sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        for waited in (*self._sockets, *self._strangers):
            if not self._loop.is_closed():
                self._loop.remove_reader(waited)
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()
        self._strangers.close()
        for stream in self._proven:
            stream.close()
        self._proven.clear()

    # -- strangers -----------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected = self._strangers.accept(listening, MAX_HELLO_SECONDS)
        except OSError as error:  # the peer has already left, or this process has no free descriptor
            self._warning.log("a connection could not be accepted: %s", error)
            return
        if connected is not None:
            use_heartbeats(connected, self._max_silence_seconds)
            self._loop.add_reader(connected, self._receive, connected)
            self._watch_late()

    def _watch_late(self) -> None:
        if self._drops_late_at == math.inf and (deadline := self._strangers.next_deadline) != math.inf:
            self._drops_late_at = deadline
            self._loop.call_later(max(deadline - time.monotonic(), 0.0), self._drop_late)

    def _drop_late(self) -> None:
        self._drops_late_at = math.inf
        self._strangers.drop_late()
        self._watch_late()

    def _record_dropped(self, connected: socket.socket, host: str, reason: str) -> None:
        self._loop.remove_reader(connected)
        self._warning.log("a connection from %s was dropped: %s", host or "a stranger", reason)

    def _receive(self, connected: socket.socket) -> None:
        host = self._strangers.host_of(connected)
        who = self._strangers.receive(connected)
        if who is None:
            return
        self._loop.remove_reader(connected)
        stream = IoStream(self._loop, connected, allowed=(self._hello,), max_frame_bytes=self._max_hello_bytes)
        stream.on_end = partial(self._dismiss, stream, host)
        stream.on_message = partial(self._meet, stream, host, int.from_bytes(who))
        no_hello = partial(self._dismiss, stream, host, f"it sent no Hello within {MAX_HELLO_SECONDS:g} s")
        self._proven[stream] = self._loop.call_later(MAX_HELLO_SECONDS, no_hello)

    # -- peers that have proved the token --------------------------------------------------------------------------------

    def _dismiss(self, stream: IoStream, host: str, reason: str) -> None:
        if (timer := self._proven.pop(stream, None)) is not None:
            timer.cancel()  # it holds the stream
            logger.warning("a connection from %s was dropped: %s", host, reason)
            stream.close()

    def _meet(self, stream: IoStream, host: str, number: int, hello: Message) -> None:
        assert isinstance(hello, Hello)
        if hello.rank == number:
            self._answer(stream, host, hello)
        else:  # it knows the token of this rank only
            self._dismiss(stream, host, f"it proved that it is rank {number}, but said that it is rank {hello.rank}")

    def _answer(self, stream: IoStream, host: str, hello: Hello) -> None:
        if stream not in self._proven:
            return  # its connection has ended meanwhile
        refusal = self._foreign(hello)
        if not refusal and (seconds := self._gatekeeper.seconds_to_wait(hello)) > 0:
            stream.allowed = ()
            self._loop.call_later(seconds, self._answer, stream, host, hello)
            return
        refusal = refusal or self._gatekeeper.refusal(hello)
        if refusal:
            stream.send(encode(Refused(reason=refusal)).buffers())
            self._dismiss(stream, host, refusal)
            return
        self._proven.pop(stream).cancel()
        stream.send(encode(Welcome(max_silence_seconds=self._max_silence_seconds)).buffers())
        self._gatekeeper.join(hello, stream, host)

    def _foreign(self, hello: Hello) -> str:
        """Returns why the peer does not belong to this cluster, or "" if it does."""
        if hello.schema != schema_digest():
            return f"it runs another version of Inflight than {self._gatekeeper.place}; install the same version on all nodes"
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
        introduce(connected, _PURPOSE, hello.rank.to_bytes(_NUMBER_BYTES), token.encode())
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
