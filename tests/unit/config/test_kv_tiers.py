"""`resolve_kv_tiers`: our settings and vLLM's, and what is wrong with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig, resolve_kv_tiers
from inflight.errors import ConfigError

FS = {"type": "fs", "path": "/mnt/kv"}
REDIS = {"type": "redis", "url": "redis://host"}
OBJ = {"type": "obj", "url": "s3://bucket"}
CUSTOM = {"type": "custom", "module_path": "package.module:Class"}


def test_tiers_in_their_order() -> None:
    assert resolve_kv_tiers(None) == resolve_kv_tiers([]) == ()
    tiers = resolve_kv_tiers(
        [{**FS, "max_bytes": 5}, {**REDIS, "ttl_seconds": 9}, OBJ, {**CUSTOM, "options": {"a": [1]}}]
    )
    assert [tier.type for tier in tiers] == ["fs", "redis", "obj", "custom"]
    assert (tiers[0].max_bytes, tiers[1].ttl_seconds, tiers[2].timeout_seconds) == (5, 9, 2.0)
    assert tiers[3].options == {"a": [1]}


def test_paths_are_absolute() -> None:
    tiers = resolve_kv_tiers([{**FS, "path": "~/kv"}, {**FS, "path": "kv"}])
    assert [tier.path for tier in tiers] == [str(Path.home() / "kv"), str(Path.cwd() / "kv")]


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "redis://user:p%40ss@host",
        "redis://:p@ss@10.0.0.1:1/15",
        "rediss://[::1]:6380?ssl_ca_certs=/ca.pem&db=3",
        "unix:///run/redis.sock",
        "unix://user:password@/run/redis.sock?db=2",
    ],
)
def test_addresses_of_redis(url: str) -> None:
    (tier,) = resolve_kv_tiers([{**REDIS, "url": url}])
    assert tier.url == url


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/", "az://container/x", "file:///tmp/kv", "memory:///"]
)
def test_addresses_of_object_stores(url: str) -> None:
    (tier,) = resolve_kv_tiers([{**OBJ, "url": url}])
    assert tier.url == url


def test_settings_of_vllm() -> None:
    fs = {"type": "fs", "root_dir": "/mnt/kv", "n_read_threads": 32, "n_write_threads": 16}
    store = {"bucket": "kv", "endpoint_override": "minio:9000", "scheme": "http", "access_key": "a", "secret_key": "s"}
    obj = {"type": "obj", "store_config": {**store, "region": ""}, "prefix": "p/q", "io_threads": 4}
    tls = {"type": "obj", "store_config": {"bucket": "kv", "endpoint_override": "host", "scheme": "https"}}
    assert resolve_kv_tiers([fs, obj, tls]) == (
        KVTierConfig(type="fs", path="/mnt/kv", max_operations=48),
        KVTierConfig(
            type="obj",
            url="s3://kv/p/q",
            options={
                "access_key_id": "a",
                "secret_access_key": "s",
                "endpoint": "http://minio:9000",
                "allow_http": True,
            },
            max_operations=4,
        ),
        KVTierConfig(type="obj", url="s3://kv/", options={"endpoint": "https://host", "allow_http": False}),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fs", r"tiers is a str, no list; give a list"),
        ({}, r"tiers is a dict, no list; give a list"),
        (["redis://:hunter2@host"], r"tiers\[0\] is a str, no dictionary; give one like"),
        ([FS, {}], r"tiers\[1\]: type=None is not one of 'fs', 'redis', 'obj', 'custom'; give one"),
        ([{"type": "p2p"}], r"tiers\[0\]: type='p2p' is not one of"),
        ([{**FS, "pth": "/x"}], r"tiers\[0\] has no 'pth'; did you mean 'path'"),
        ([{"type": "fs"}], r"tiers\[0\]: its path is missing; give one like '/mnt/kv'"),
        ([{**FS, "path": 5}], r"tiers\[0\]: path=5 is not a text"),
        ([{**FS, "max_bytes": -1}], r"max_bytes=-1 is not an integer in \[0, "),
        ([{**FS, "max_bytes": 2.5}], r"max_bytes=2.5 is not an integer"),
        ([{**FS, "url": "redis://:hunter2@host"}], r"a tier of type 'fs', which takes no url; leave it out"),
        ([{**REDIS, "max_bytes": 5}], r"a tier of type 'redis', which takes no max_bytes; leave it out"),
        ([{**FS, "n_read_threads": "x"}], r"max_operations=\['x'\] is not an integer"),
        ([{**FS, "timeout_seconds": 0}], r"timeout_seconds=0 is not a number in \(0, 600\]"),
        ([{**REDIS, "ttl_seconds": -1}], r"ttl_seconds=-1"),
        ([{**FS, "blocks_per_chunk": 2}], r"a tier of type 'fs', which takes no blocks_per_chunk; leave it out"),
        ([{**OBJ, "blocks_per_chunk": 0}], r"blocks_per_chunk=0 is not an integer in \[1, 64\]"),
        (
            [{**OBJ, "blocks_per_chunk": 4}, OBJ, {**OBJ, "blocks_per_chunk": 8}],
            r"blocks_per_chunk has different values above 1: \[4, 8\]; give each tier 1 or one of them",
        ),
        ([{**FS, "checksum_key": "hunter2"}], r"checksum_key is shorter than 16 characters; give a longer one"),
        ([{**FS, "checksum_key": ["hunter2"]}], r"checksum_key is not a text"),
        ([{**OBJ, "options": "hunter2"}], r"options is not a dictionary"),
        ([{"type": "obj", "store_config": {"endpoint_override": "x", "secret_key": "hunter2"}}], "its url is wrong"),
        ([{**CUSTOM, "module_path": "package.module"}], "module_path is wrong; give one like .package.module:Class"),
        *(
            ([{**REDIS, "url": url}], r"its url is wrong; give one like 'redis://user:password@host:6379/0'")
            for url in (
                "host:6379", "http://:hunter2@host", "redis://", "redis://:hunter2@host/x", "redis://:hunter2@host:port",
                "redis://:hunter2@host?socket_timeout=9", "redis://:hunter2@host\n", "unix://", "redis://:hunter2@ho st",
            )
        ),
        *(
            ([{**OBJ, "url": url}], r"its url is wrong; give one like 's3://bucket/prefix'")
            for url in ("bucket", "s3://", "s3://key:hunter2@bucket", "s3://b?x=hunter2", "https://hunter2", "file://x", "file:///")
        ),
    ],
)  # fmt: skip
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kv\..*{message}") as error:
        resolve_kv_tiers(given, "kv.tiers")
    assert "hunter2" not in str(error.value)


def test_secrets_are_not_shown() -> None:
    tiers = resolve_kv_tiers(
        [
            {**REDIS, "url": "redis://:hunter2@host", "checksum_key": "hunter2" * 3},
            {**OBJ, "options": {"secret_access_key": "hunter2"}},
        ]
    )
    assert "hunter2" not in repr(tiers)


@pytest.mark.parametrize(("tier", "library"), [(FS, "xxhash"), (REDIS, "redis"), (OBJ, "obstore")])
def test_a_missing_library(monkeypatch: pytest.MonkeyPatch, tier: dict[str, str], library: str) -> None:
    real = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == library else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=rf"{library}, .*'inflight-llm\[kv-tiers\]'"):
        resolve_kv_tiers([tier])
    assert resolve_kv_tiers([]) == ()


def test_what_is_just_allowed() -> None:
    chunks = [{**OBJ, "blocks_per_chunk": 4}, OBJ, {**OBJ, "blocks_per_chunk": 4}]
    assert [tier.blocks_per_chunk for tier in resolve_kv_tiers(chunks)] == [4, 1, 4]
    (tier,) = resolve_kv_tiers(({**FS, "checksum_key": "k" * 16},))
    assert tier.checksum_key == "k" * 16
    with pytest.raises(ConfigError, match="shorter than 16"):
        resolve_kv_tiers([{**FS, "checksum_key": "k" * 15}])


@pytest.mark.parametrize(
    ("store", "url", "options"),
    [
        ({"bucket": "kv", "region": "eu"}, "s3://kv/", {"region": "eu"}),
        ({"bucket": "kv", "endpoint_override": "h:9"}, "s3://kv/", {"endpoint": "http://h:9", "allow_http": True}),
        ({"bucket": "kv", "scheme": "https", "secret_key": "s"}, "s3://kv/", {"secret_access_key": "s"}),
    ],
)
def test_stores_of_vllm(store: dict[str, str], url: str, options: dict[str, Any]) -> None:
    given = {"type": "obj", "store_config": store}
    (tier,) = resolve_kv_tiers([given])
    assert (tier.url, tier.options, tier.max_operations) == (url, options, 16)
    assert given == {"type": "obj", "store_config": store}, "what the user gave is as before"
