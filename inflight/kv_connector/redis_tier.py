"""`RedisTier`: objects in Redis, or a server that speaks its protocol.

redis-py makes the connections: addresses, TLS, passwords, their pool. Commands and answers go over its sockets directly,
because redis-py copies an answer several times: GET of 1.8 MB takes 3 to 9 ms with it, and 0.8 ms straight into the buffer.
The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
"""

import errno
import re
import socket
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.tier import Tier

_MAX_LINE_BYTES = 4096
_NOTHING = memoryview(b"")


class _DamagedError(OSError):
    """The value under the object's name cannot be an object: it has another type, or is too long."""


class RedisTier(Tier):
    """
    Raises:
        ConfigError: the address cannot be used.
    """

    @classmethod
    def open(cls, config: KVTierConfig, shard: str, num_shards: int) -> Self:
        return cls(config)

    def __init__(self, config: KVTierConfig) -> None:
        assert config.url is not None
        seconds = 0.9 * config.timeout_seconds  # an operation ends by itself before `GuardedTier` gives it up
        try:
            self._pool = redis.ConnectionPool.from_url(
                config.url,
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            self._pool.connection_class(**self._pool.connection_kwargs)  # connects to nothing; refuses unknown options
        except (ValueError, TypeError, redis.RedisError) as error:
            # without the error's text, which may contain the address with its password
            raise ConfigError(
                f"secondary_tiers: the url of a redis tier cannot be used ({type(error).__name__}); correct it"
            ) from None
        self._expiry = ("EX", config.ttl_seconds) if config.ttl_seconds else ()

    def get(self, name: bytes, into: memoryview) -> int | None:
        try:
            return self._call("GET", _key(name), into=into)
        except _DamagedError:
            return 0

    def put(self, name: bytes, data: memoryview) -> None:
        if not self._call("EXISTS", _key(name)):  # otherwise the whole object would be sent in vain
            self._call("SET", _key(name), data, "NX", *self._expiry)

    def touch(self, name: bytes) -> bool:
        if self._expiry:  # EXPIRE counts as a use, too
            return self._call("EXPIRE", _key(name), self._expiry[1]) == 1
        return self._call("TOUCH", _key(name)) == 1

    def discard(self, name: bytes) -> None:
        self._call("DEL", _key(name))

    def close(self) -> None:
        self._pool.disconnect()

    def _call(self, *command: str | bytes | int | memoryview, into: memoryview = _NOTHING) -> int | None:
        """Sends a command. Returns the answer if it is a number, 0 for "OK", None for nil, and the length of an answer that was
        received into `into`."""
        connection: Any = self._pool.get_connection()  # Any: redis-py types it in part
        try:
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
            return _receive(connection._sock, into)
        except BaseException:
            connection.disconnect()  # the rest of an answer may still come
            raise
        finally:
            self._pool.release(connection)


def _key(name: bytes) -> bytes:
    return b"inflight:kv:" + name


def _receive(peer: socket.socket, into: memoryview) -> int | None:
    with peer.makefile("rb") as reader:  # large reads bypass its buffer; it cannot read more than this answer
        line = reader.readline(_MAX_LINE_BYTES)
        if not (parts := re.fullmatch(rb"(?:([:$])(-?\d{1,18})|-([A-Z]+).*|\+.*)\r\n", line)):
            raise ConnectionError(errno.EPROTO, "the server's answer is cut short or not understood")
        if parts[3]:  # without the rest of the text, which could repeat what was sent
            kind = _DamagedError if parts[3] == b"WRONGTYPE" else OSError
            raise kind(errno.EPROTO, f"the server answers {parts[3].decode()}")
        number = int(parts[2] or 0)
        if parts[1] != b"$" or number < 0:
            return None if number < 0 else number
        if number > len(into):
            raise _DamagedError(errno.EMSGSIZE, "the object is too long")
        if reader.readinto(into[:number]) != number or reader.read(2) != b"\r\n":
            raise ConnectionError(errno.ECONNRESET, "the server's answer is cut short")
        return number
