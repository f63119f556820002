"""`RedisTier` with a real server that dies, stops, refuses or holds something else, and with ones that break the protocol."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.redis_tier import RedisTier
from inflight.kv_connector.tier_object import PAGE
from inflight.kv_connector.tier_stack import TierStack
from tests.support.kv_tier_servers import redis_server, scripted_server

pytestmark = pytest.mark.usefixtures("patient_breakers")

KEY = b"k" * 33
TEXT = memoryview(b"text" * 3000)


def stack(url: str, **more: Any) -> TierStack:
    config = KVTierConfig(type="redis", url=url, **{"timeout_seconds": 300.0, **more})
    return TierStack([config], root=b"r" * 32, shard="s", num_shards=1, payload_bytes=len(TEXT))


def counts(tiers: TierStack) -> dict[str, float]:
    found = tiers.take_counts()["redis"]
    return {name: found[name] for name in ("hits", "misses", "errors", "checksum_failures", "rejected") if found[name]}


def test_keys_and_how_long_they_are_kept(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        for seconds in (0, 1000):
            server.client.flushall()
            tiers = stack(server.url, ttl_seconds=seconds)
            assert tiers.store([KEY], [TEXT])
            (key,) = server.client.keys("*")
            assert key.startswith(b"inflight:kv:") and len(key) == 12 + 32
            assert 990 <= server.client.ttl(key) <= 1000 if seconds else server.client.ttl(key) == -1
            tiers.close()


def test_password_and_database(tmp_path: Path) -> None:
    with redis_server(tmp_path, password="hunter2") as server:
        tiers = stack(f"{server.url}?db=3")
        assert tiers.store([KEY], [TEXT]) and tiers.fetch([KEY])[0] is not None
        assert server.client.info("keyspace").keys() == {"db3"}
        tiers.close()


@pytest.mark.parametrize("url", ["unix://:wrong-secret@", "unix://"])
def test_a_refused_password(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, password="hunter2") as server, caplog.at_level(logging.DEBUG):
        tiers = stack(url + server.url.partition("@")[2])
        for _ in range(4):
            assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
        assert counts(tiers)["errors"] == 6
        tiers.close()
    assert "The KV tier redis is left out for a while" in caplog.text
    assert "AuthenticationError" in caplog.text or "NOAUTH" in caplog.text
    assert "wrong-secret" not in caplog.text and "hunter2" not in caplog.text


def test_a_killed_server(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        tiers = stack(server.url)
        assert tiers.store([KEY], [TEXT])
        server.process.kill()
        server.process.wait()
        assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
        assert counts(tiers) == {"errors": 2}
        tiers.close()


def test_a_connection_that_was_closed_is_made_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        tiers = stack(server.url)
        assert tiers.store([KEY], [TEXT])
        server.client.execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "normal")
        assert tiers.fetch([KEY])[0] is not None
        assert counts(tiers) == {"hits": 1}
        tiers.close()


def test_a_stopped_server(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        tiers = stack(server.url, timeout_seconds=0.05)
        server.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(5):
                assert tiers.fetch([KEY])[0] is None
            assert counts(tiers) == {"errors": 3, "rejected": 2}
        finally:
            server.process.send_signal(signal.SIGCONT)
        tiers.close()
        tiers = stack(server.url)
        assert tiers.store([KEY], [TEXT]) and tiers.fetch([KEY])[0] is not None
        tiers.close()


def test_a_server_that_says_nothing() -> None:
    with scripted_server(lambda connection: None) as port:
        tiers = stack(f"redis://127.0.0.1:{port}", timeout_seconds=0.05)
        assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
        assert counts(tiers) == {"errors": 2}
        tiers.close()


@pytest.mark.parametrize("command", [("LPUSH", "x"), ("HSET", "a", "b"), ("SET", b"x" * 10 * len(TEXT))])
def test_something_else_under_the_name_is_replaced(tmp_path: Path, command: tuple[Any, ...]) -> None:
    with redis_server(tmp_path) as server:
        tiers = stack(server.url)
        assert tiers.store([KEY], [TEXT])
        (key,) = server.client.keys("*")
        server.client.delete(key)
        server.client.execute_command(command[0], key, *command[1:])
        assert tiers.store([KEY], [TEXT])  # not looked at
        assert tiers.fetch([KEY])[0] is None
        assert counts(tiers) == {"checksum_failures": 1}
        assert tiers.store([KEY], [TEXT])
        found = tiers.fetch([KEY])[0]
        assert found is not None and found[0] == TEXT
        assert counts(tiers) == {"hits": 1}
        tiers.close()


def test_a_server_without_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, "--maxmemory", "1") as server:
        tiers = stack(server.url)
        for number in range(3):
            assert not tiers.store([b"%33d" % number], [TEXT])
        assert tiers.fetch([KEY])[0] is None
        assert counts(tiers) == {"errors": 3, "misses": 1}
        assert "the server answers OOM" in caplog.text
        tiers.close()


def scripted(answers: dict[bytes, bytes]) -> Callable[[socket.socket], None]:
    """Answers "+OK" to each command but those that are named."""

    def answer(connection: socket.socket) -> None:
        while received := connection.recv(65536):
            while b"\r\n" not in received or not received.endswith(b"\r\n"):
                received += connection.recv(65536)
            for name in (word for word in received.split(b"\r\n") if word in (b"GET", b"EXISTS", b"SET", b"CLIENT")):
                reply = answers.get(name, b"+OK\r\n")
                connection.sendall(reply)
                if not reply.endswith(b"\r\n"):
                    connection.shutdown(socket.SHUT_RDWR)

    return answer


@pytest.mark.parametrize(
    "reply",
    [
        b"$8192\r\nshort",  # cut short
        b"$819",
        b"$text\r\n",
        b"*1\r\n:1\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"x" * 10000,
        b"-ERR secret-text\r\n",
        b"$4\r\ntext",
    ],
)
def test_a_broken_protocol_is_a_failure(reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with scripted_server(scripted({b"GET": reply})) as port:
        tiers = stack(f"redis://127.0.0.1:{port}")
        for _ in range(3):
            assert tiers.fetch([KEY])[0] is None
        assert counts(tiers) == {"errors": 3}
        assert "left out" in caplog.text and "secret-text" not in caplog.text
        tiers.close()


def test_an_answer_in_pieces(tmp_path: Path) -> None:
    """The answer's first bytes, and its end, may be in any packet."""
    data = os.urandom(PAGE)
    reply = b"$%d\r\n%b\r\n" % (PAGE, data)

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while received := connection.recv(65536):
            for word in received.split(b"\r\n"):
                if word == b"CLIENT":
                    connection.sendall(b"+OK\r\n")
                elif word == b"GET":
                    for start in (*range(9), *range(9, len(reply) - 2, 1000), len(reply) - 2, len(reply) - 1):
                        end = start + 1 if start < 9 or start >= len(reply) - 2 else min(start + 1000, len(reply) - 2)
                        connection.sendall(reply[start:end])

    with scripted_server(answer) as port:
        tier = RedisTier(KVTierConfig(type="redis", url=f"redis://127.0.0.1:{port}", timeout_seconds=300))
        into = memoryview(bytearray(2 * PAGE))
        for _ in range(3):
            assert tier.get(b"n" * 32, into) == PAGE and into[:PAGE] == data
        tier.close()


def test_an_address_that_cannot_be_used() -> None:
    config = KVTierConfig(type="redis", url="redis://u:hunter2@host:1/0?ssl_check_hostname=1")
    with pytest.raises(ConfigError, match=r"redis tier .*\(\w+\)") as error:
        RedisTier(config)
    assert "hunter2" not in str(error.value) and error.value.__cause__ is None


@pytest.mark.parametrize("seconds", [0, 1000])
def test_use_in_a_nearer_place_extends_the_life_of_an_object(tmp_path: Path, seconds: int) -> None:
    with redis_server(tmp_path) as server:
        tiers = stack(server.url, ttl_seconds=seconds)
        assert not tiers.touch([KEY])
        assert tiers.store([KEY], [TEXT])
        (key,) = server.client.keys("*")
        if seconds:
            server.client.expire(key, 5)
        assert tiers.touch([KEY])
        assert 990 <= server.client.ttl(key) <= 1000 if seconds else server.client.object("idletime", key) == 0
        server.process.kill()
        server.process.wait()
        assert tiers.touch([KEY]), "nobody knows that it is lost"
        tiers.close()
