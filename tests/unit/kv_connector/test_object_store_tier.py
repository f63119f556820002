"""`ObjectStoreTier` with moto's S3 and with servers that fail, are slow, or cut an answer short."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.object_store_tier import ObjectStoreTier
from inflight.kv_connector.tier_stack import TierStack
from tests.support.kv_tier_servers import http_answers, s3_options, s3_server, scripted_server

pytestmark = pytest.mark.usefixtures("patient_breakers")

KEY = b"k" * 33
TEXT = memoryview(b"text" * 3000)


def stack(options: dict[str, Any] | None, url: str = "s3://bucket/prefix", **more: Any) -> TierStack:
    config = KVTierConfig(type="obj", url=url, options=options, **{"timeout_seconds": 300.0, **more})
    return TierStack([config], root=b"r" * 32, shard="s", num_shards=1, payload_bytes=len(TEXT))


def counts(tiers: TierStack) -> dict[str, float]:
    found = tiers.take_counts()["obj"]
    return {name: found[name] for name in ("hits", "misses", "errors", "checksum_failures", "rejected") if found[name]}


def test_in_memory() -> None:
    tiers = stack(None, "memory:///")
    assert tiers.fetch([KEY])[0] is None
    assert tiers.store([KEY], [TEXT]) and tiers.store([KEY], [TEXT])
    found = tiers.fetch([KEY])[0]
    assert found is not None and found[0] == TEXT
    assert counts(tiers) == {"misses": 1, "hits": 1}
    tiers.close()


def test_a_missing_bucket() -> None:
    with s3_server() as options:
        tiers = stack(options)
        assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
        assert counts(tiers) == {"errors": 2}
        tiers.close()


@pytest.mark.parametrize(
    "status", ["500 Internal Server Error", "503 Slow Down", "403 Forbidden", "301 Moved", "nonsense"]
)
def test_a_server_that_refuses(status: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        scripted_server(http_answers(f"HTTP/1.1 {status}\r\ncontent-length: 0".encode())) as port,
        caplog.at_level(logging.DEBUG),
    ):
        tiers = stack(s3_options(port))
        for _ in range(3):
            assert tiers.fetch([KEY])[0] is None
        assert not tiers.store([KEY], [TEXT])
        assert counts(tiers) == {"errors": 4}
        tiers.close()
    assert "The KV tier obj is left out for a while" in caplog.text
    assert "very-secret" not in caplog.text


@pytest.mark.parametrize("length", [8192, 4096, 0])
def test_an_answer_that_is_cut_short_or_damaged(length: int) -> None:
    head = (
        f'HTTP/1.1 200 OK\r\ncontent-length: {length}\r\netag: "x"\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT'
    ).encode()
    with scripted_server(http_answers(head, bytes(min(length, 4096)))) as port:
        tiers = stack(s3_options(port))
        assert tiers.fetch([KEY])[0] is None
        found = tiers.take_counts()["obj"]
        assert found["checksum_failures"] == (length < 8192) and found["hits"] == found["misses"] == 0
        assert found["errors"] >= (length == 8192)
        tiers.close()


def test_an_object_that_is_too_long_is_not_read() -> None:
    head = (
        b'HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\netag: "x"\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT'
    )
    with scripted_server(http_answers(head, b"x")) as port:
        tier = ObjectStoreTier(KVTierConfig(type="obj", url="s3://bucket", options=s3_options(port)))
        assert tier.get(b"n" * 32, memoryview(bytearray(10))) == 10**12


def test_a_slow_server() -> None:
    with scripted_server(lambda connection: None) as port:
        tiers = stack(s3_options(port), timeout_seconds=0.05)
        assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
        assert counts(tiers) == {"errors": 2}
        tiers.close()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://bucket", {"endpont": "hunter2"}, "endpont"),
        ("s3://bucket", {"timeout": "hunter2"}, "cannot be used"),
        ("s3://bucket", {"region": "r", "skip_signature": "hunter2"}, "cannot be used"),
        ("memory:///", {"region": "hunter2"}, "an obj tier at 'memory:///' takes no options; leave them out"),
        ("file:///proc/none/x", None, "cannot be used"),
    ],
)
def test_wrong_options(url: str, options: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"secondary_tiers: .*{message}") as error:
        ObjectStoreTier(KVTierConfig(type="obj", url=url, options=options))
    assert "hunter2" not in str(error.value) and error.value.__cause__ is None
