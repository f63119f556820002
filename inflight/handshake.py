"""The handshake with which two processes begin a connection: each proves that it knows the token, and the token is never sent.

    acceptor  -- greeting: a magic word, a nonce -->                     connector
    acceptor  <-- answer: who it is, a nonce, its proof --               connector
    acceptor  -- verdict: its proof, or 32 zero bytes if it refuses -->  connector

A proof is an HMAC-SHA-256 under the token (RFC 2104), over the side that proves, the purpose of the connection, who connects,
both nonces and, if `address` is given, the address at which the acceptor was reached. So a proof is worth nothing in another
connection, for another purpose or for the other side. With an address, it is also worth nothing to a process that relays the
bytes from another address. A connector without the token gets no proof on which it could try guesses of the token. Who reads
the packets, or listens in place of the acceptor, gets one: so the token must be long and random.

What follows is not encrypted. So a process that can change packets on the network between the two is not kept out.

All processes of one engine have the same version, so the handshake has no version but the magic word.
"""

import hmac
import secrets
import socket
from collections.abc import Callable

MAGIC = b"inflght2"
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
REFUSED = bytes(PROOF_BYTES)


class RefusedError(ConnectionError):
    """The acceptor does not accept the proof of the connector: it has another token, or expects somebody else."""


class ImpostorError(ConnectionError):
    """The acceptor has not proved that it knows the token, or does not speak this protocol."""


class Acceptance:
    """The acceptor's side of one connection. It does no I/O: the caller sends `greeting`, then receives `num_missing` bytes.

    Args:
        purpose: what the connection is for, the same on both sides.
        who_bytes: how many bytes the connector needs to say who it is.
        address: at which the connector has reached this process; b"" if the two sides may see different addresses.
    """

    def __init__(self, purpose: bytes, who_bytes: int, address: bytes = b"") -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.greeting = MAGIC + nonce
        self._context = (purpose, address)
        self._nonce = nonce
        self._who_bytes = who_bytes
        self._received = b""

    @property
    def num_missing(self) -> int:
        """How many bytes of the connector's answer are missing."""
        return self._who_bytes + NONCE_BYTES + PROOF_BYTES - len(self._received)

    def add(self, received: bytes) -> None:
        """Add bytes of the connector's answer, at most `num_missing`."""
        self._received += received

    def judge(self, token_of: Callable[[bytes], bytes | None]) -> tuple[bytes | None, bytes]:
        """Check the proof. Call this once, when no byte is missing. `token_of`: name of the connector -> its token; None if
        nobody with this name may connect.

        Returns:
            who has proved to connect, or None; and the verdict, which the caller sends in both cases.
        """
        who = self._received[: self._who_bytes]
        rest = self._received[self._who_bytes :]
        nonces = self._nonce + rest[:NONCE_BYTES]
        token = token_of(who)
        if not token or not hmac.compare_digest(
            rest[NONCE_BYTES:], _proof(token, b"connector", who, nonces, *self._context)
        ):
            return None, REFUSED
        return who, _proof(token, b"acceptor", who, nonces, *self._context)


def introduce(connection: socket.socket, purpose: bytes, who: bytes, token: bytes, address: bytes = b"") -> None:
    """The connector's side. It blocks, with the socket's timeout for each step. The caller closes the socket after an error.

    Raises:
        RefusedError: the acceptor refuses this connection.
        ImpostorError: the acceptor does not know the token, or is another program.
        OSError: the connection was lost, or the acceptor was silent for too long.
    """
    greeting = _receive(connection, GREETING_BYTES)
    if not greeting.startswith(MAGIC):
        raise ImpostorError(f"it begins with {greeting[:16]!r}, which is not the greeting of Inflight")
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(MAGIC) :] + nonce
    connection.sendall(who + nonce + _proof(token, b"connector", who, nonces, purpose, address))
    verdict = _receive(connection, PROOF_BYTES)
    if verdict == REFUSED:
        raise RefusedError("it does not accept this process's proof that it knows the token")
    if not hmac.compare_digest(verdict, _proof(token, b"acceptor", who, nonces, purpose, address)):
        raise ImpostorError("it does not know the token")


def address_bytes(name: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """The result of `getsockname` or `getpeername` of a TCP socket, as both sides sign it."""
    return f"{name[0]} {name[1]}".encode()


def _proof(token: bytes, side: bytes, *parts: bytes) -> bytes:
    signed = b"".join(len(part).to_bytes(4) + part for part in (b"inflight handshake", side, *parts))
    return hmac.digest(token, signed, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        if not (more := connection.recv(count - len(received))):
            raise ConnectionError("it closed the connection before it had proved that it knows the token")
        received += more
    return received
