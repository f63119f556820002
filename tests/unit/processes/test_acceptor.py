"""`Acceptor` and `connect`: what a peer hears, and what its gatekeeper is asked. test_join.py and test_remote_replica.py
have the two gatekeepers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from inflight.errors import ConfigError, EngineError
from inflight.handshake import PROOF_BYTES, Acceptance
from inflight.interface.codec import encode, schema_digest
from inflight.interface.start_up import Hello, Preload, Welcome
from inflight.processes import acceptor as acceptor_module
from inflight.processes.acceptor import Acceptor, connect
from inflight.processes.streams import IoStream

TOKEN = "a long random text"
HELLO = Hello(schema=schema_digest(), rank=1, world_size=2, nnodes=2)


class Gatekeeper:
    """Attributes: `waits`: how long each answer is delayed, from the last to the first; `reason`: why nobody may join."""

    place = "the door"

    def __init__(self, *waits: float, reason: str = "") -> None:
        self.waits, self.reason = list(waits), reason
        self.joined: list[tuple[int, str]] = []
        self.streams: list[IoStream] = []

    def token_of(self, number: int) -> str:
        return TOKEN if number < 3 else ""

    def seconds_to_wait(self, hello: Hello) -> float:
        return self.waits.pop() if self.waits else 0.0

    def refusal(self, hello: Hello) -> str:
        assert not self.waits, "it was to wait"
        return self.reason

    def join(self, hello: Hello, stream: IoStream, host: str) -> None:
        self.joined.append((hello.rank, host))
        self.streams.append(stream)


def asked(gatekeeper: Gatekeeper, hello: Hello, token: str = TOKEN) -> str:
    """Why the peer was refused; "" if it has joined."""

    async def ask() -> str:
        made = Acceptor(
            asyncio.get_running_loop(),
            gatekeeper,
            ("127.0.0.1", 0),
            "no option",
            max_silence_seconds=10.0,
            hello=(Hello, 4096),
        )
        made.start()
        try:
            connected = await asyncio.to_thread(connect, made.address, hello, token, max_seconds=300, place="the door")
        except ConfigError as error:
            return str(error)
        finally:
            made.close()
            made.close()
            for stream in gatekeeper.streams:
                stream.close()
        connected.close()
        return ""

    return asyncio.run(asyncio.wait_for(ask(), 300))


def test_a_peer_joins_after_the_wait_that_its_gatekeeper_wants() -> None:
    gatekeeper = Gatekeeper(0.01, 0.02)
    assert asked(gatekeeper, HELLO) == ""
    assert gatekeeper.joined == [(1, "127.0.0.1")] and not gatekeeper.waits


@pytest.mark.parametrize("number", [1, 3])
def test_the_reason_of_a_refusal_reaches_the_peer(number: int) -> None:
    gatekeeper = Gatekeeper(reason="no room")
    hello = Hello(schema=HELLO.schema, rank=number, world_size=2, nnodes=2)
    expected = "no room" if number == 1 else "INFLIGHT_CLUSTER_TOKEN"
    assert expected in asked(gatekeeper, hello)
    assert not gatekeeper.joined


def test_another_version_is_refused_before_the_gatekeeper_is_asked() -> None:
    gatekeeper = Gatekeeper(300.0, reason="not asked")
    assert "another version" in asked(gatekeeper, Hello(schema="old", rank=1, world_size=2, nnodes=2))
    assert gatekeeper.waits == [300.0]


def in_thread(function: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a failing test leaves it, and pytest still ends
    return future


def test_a_rank_tells_nothing_to_a_node_0_without_the_token_and_does_not_obey_it() -> None:
    """Whoever listens at the address: another user of the machine, after node 0 has died."""
    heard: list[bytes] = []

    def rogue(server: socket.socket) -> None:
        connected, _ = server.accept()
        with connected:
            connected.sendall(Acceptance(b"join", 4).greeting)
            answer = connected.recv(68, socket.MSG_WAITALL)
            connected.sendall(b"\x01" * PROOF_BYTES)
            for message in (Welcome(max_silence_seconds=10.0), Preload(worker_class="this:s")):
                with contextlib.suppress(OSError):
                    connected.sendall(b"".join(map(bytes, encode(message).buffers())))
            with contextlib.suppress(ConnectionResetError):
                heard.extend([answer, connected.recv(1 << 16)])

    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = in_thread(lambda: rogue(server))
        with pytest.raises(EngineError, match=r"not node 0 .*token"):
            connect(server.getsockname(), HELLO, TOKEN, max_seconds=300)
        listening.result(timeout=300)
    assert TOKEN.encode() not in b"".join(heard) and len(b"".join(heard)) == 68, "no Hello follows"


def test_a_program_that_accepts_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_HELLO_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its end also ends a wait without a limit
        address = silent.getsockname()
        connecting = in_thread(lambda: connect(address, HELLO, TOKEN, max_seconds=300).close())
        with pytest.raises(EngineError, match="is not node 0 of Inflight: "):
            connecting.result(timeout=300)
