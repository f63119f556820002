"""What is true of every tier: objects come back, the first writer wins, and what is damaged is missing until it is repaired."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest
from obstore.store import from_url

from inflight.config.kv_tiers import KVTierConfig, resolve_kv_tiers
from inflight.kv_connector.tier_object import HEADER, PAGE, padded
from inflight.kv_connector.tier_stack import TierStack
from tests.support.kv_tier_servers import direct_store, new_bucket, redis_server

ROOT = b"r" * 32
PAYLOAD_BYTES = 3 * PAGE
SECRET = "sixteen characters"


class Place(NamedTuple):
    """A tier, and ways to its objects around it."""

    config: KVTierConfig
    names: Callable[[], list[Any]]
    read: Callable[[Any], bytes]
    write: Callable[[Any, bytes], object]


def at_store(config: dict[str, Any], place: Any, folder: Path | None = None) -> Place:
    def write(name: str, data: bytes) -> None:
        if folder is not None:  # obstore would make another file
            (folder / name).write_bytes(data)
        else:
            obstore.put(place, name, data)

    return Place(
        resolve_kv_tiers([{**config, "timeout_seconds": 300}])[0],
        lambda: [each["path"] for batch in obstore.list(place) for each in batch],
        lambda name: bytes(obstore.get(place, name).bytes()),
        write,
    )


@pytest.fixture(params=["fs", "redis", "obj-file", "obj-s3", "custom"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "fs":
        config = {"type": "fs", "path": str(tmp_path), "max_bytes": 2**30, "timeout_seconds": 300}
        yield Place(
            resolve_kv_tiers([config])[0],
            lambda: [path for path in tmp_path.rglob("*") if path.is_file()],
            lambda path: path.read_bytes(),
            lambda path, data: path.write_bytes(data),
        )
    elif request.param == "redis":
        with redis_server(tmp_path) as server:
            config = {"type": "redis", "url": server.url, "timeout_seconds": 300}
            client = server.client
            yield Place(resolve_kv_tiers([config])[0], lambda: client.keys("*"), client.get, client.set)
    elif request.param == "obj-file":
        (tmp_path / "kv").mkdir()
        url = f"file://{tmp_path}/kv"
        yield at_store({"type": "obj", "url": url}, from_url(url), tmp_path / "kv")
    elif request.param == "obj-s3":
        options = request.getfixturevalue("s3")
        bucket = new_bucket(options)
        url = f"s3://{bucket}/some/prefix"
        yield at_store({"type": "obj", "url": url, "options": options}, direct_store(url, options))
    else:
        objects: dict[bytes, bytes] = {}
        config = {
            "type": "custom",
            "module_path": "tests.support.kv_tier_examples:DictTier",
            "options": {"objects": objects},
            "timeout_seconds": 300,
        }
        tier = resolve_kv_tiers([config])[0]
        object.__setattr__(tier, "options", Shared(objects))
        yield Place(tier, lambda: list(objects), objects.__getitem__, objects.__setitem__)


class Shared(dict):  # type: ignore[type-arg]
    """Options with the dictionary itself: two tiers made with them share it."""

    def __init__(self, objects: dict[bytes, bytes]) -> None:
        super().__init__(objects=objects)


def stack(place: Place, root: bytes = ROOT, **changed: Any) -> TierStack:
    from dataclasses import replace

    config = replace(place.config, **changed)
    return TierStack([config], root=root, shard="tp0of1-pp0of1", num_shards=1, payload_bytes=PAYLOAD_BYTES)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + b"\0"


def payload(number: int, length: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(hashlib.shake_128(b"%d" % number).digest(length))


def fetched(tiers: TierStack, number: int) -> bytes | None:
    found = tiers.fetch([key(number)])[0]
    assert found is None or found[1] == 0
    return None if found is None else bytes(found[0])


def counted(tiers: TierStack) -> dict[str, float]:
    ((_, counts),) = tiers.take_counts().items()
    return {name: n for name, n in counts.items() if n and name not in ("read_seconds", "written_seconds")}


def test_round_trip_and_counts(place: Place) -> None:
    tiers = stack(place)
    assert fetched(tiers, 1) is None
    assert tiers.store([key(1)], [payload(1)])
    assert tiers.store([key(2)], [payload(2, 1)]) and tiers.store([key(3)], [payload(3, 0)])
    assert [fetched(tiers, n) for n in (1, 2, 3, 4)] == [payload(1), payload(2, 1), b"", None]
    sizes = padded(PAYLOAD_BYTES) + 2 * PAGE
    assert counted(tiers) == {
        "misses": 2, "stored": 3, "hits": 3, "written_bytes": sizes, "read_bytes": sizes,
    }  # fmt: skip
    tiers.close()
    again = stack(place)
    assert fetched(again, 1) == payload(1)
    again.close()


def test_what_is_there_is_not_written_again(place: Place) -> None:
    tiers = stack(place)
    assert tiers.store([key(1)], [payload(1)])
    assert tiers.store([key(1)], [payload(2)])
    assert fetched(tiers, 1) == payload(1)
    tiers.close()


def test_many_writers_and_readers_of_the_same_keys(place: Place) -> None:
    """Two stacks as two engines, four threads of each."""
    stacks = [stack(place), stack(place)]
    wrong: list[int] = []

    def work(tiers: TierStack) -> None:
        for number in range(6):
            if not tiers.store([key(number)], [payload(number)]) or fetched(tiers, number) != payload(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(tiers,)) for tiers in stacks * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(place.names()) == 6
    for tiers in stacks:
        found = counted(tiers)
        assert found["hits"] == 24 and found["stored"] == 24 and set(found) <= {
            "hits", "stored", "read_bytes", "written_bytes",
        }  # fmt: skip
        tiers.close()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip in the payload": lambda data: data[:5000] + bytes([data[5000] ^ 4]) + data[5001:],
    "flip in the digest": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "cut to a page": lambda data: data[:PAGE],
    "cut short": lambda data: data[:-1],
    "cut within the header": lambda data: data[:20],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "too long": lambda data: data + b"\0",
    "far too long": lambda data: data * 10,
    "another version": lambda data: data[:7] + b"\x09" + data[8:],
}


@pytest.mark.parametrize("secret", [None, SECRET])
def test_damaged_objects_are_missing_and_repaired(place: Place, secret: str | None) -> None:
    tiers = stack(place, checksum_key=secret)
    for damage in DAMAGES.values():
        assert tiers.store([key(1)], [payload(1)])
        (name,) = place.names()
        place.write(name, damage(place.read(name)))
        tiers.take_counts()
        assert fetched(tiers, 1) is None
        found = counted(tiers)
        assert found.pop("checksum_failures") == 1 and set(found) <= {"read_bytes"}
        assert tiers.store([key(1)], [payload(1)])
        assert fetched(tiers, 1) == payload(1)
    tiers.close()


def test_swapped_objects(place: Place) -> None:
    tiers = stack(place)
    assert tiers.store([key(1)], [payload(1)]) and tiers.store([key(2)], [payload(2)])
    first, second = place.names()
    data = place.read(first), place.read(second)
    place.write(first, data[1])
    place.write(second, data[0])
    assert fetched(tiers, 1) is None and fetched(tiers, 2) is None
    assert counted(tiers)["checksum_failures"] == 2
    tiers.close()


def test_objects_of_another_root_or_secret_are_other_objects(place: Place) -> None:
    stacks = [stack(place), stack(place, b"s" * 32), stack(place, checksum_key=SECRET)]
    for number, tiers in enumerate(stacks):
        assert fetched(tiers, 1) is None
        assert tiers.store([key(1)], [payload(number)])
    assert [fetched(tiers, 1) for tiers in stacks] == [payload(number) for number in range(3)]
    assert len(place.names()) == 3
    # written under the name of another root by someone who can write there
    data = {name: place.read(name) for name in place.names()}
    for name in data:
        for other in data.values():
            if other != data[name]:
                place.write(name, other)
                assert [fetched(tiers, 1) for tiers in stacks].count(None) == 1
                place.write(name, data[name])
    for tiers in stacks:
        assert "errors" not in counted(tiers)
        tiers.close()


def test_a_forged_object_needs_the_secret(place: Place) -> None:
    """A writer without the secret knows the name, and computes a digest without a secret."""
    from inflight.kv_connector.tier_object import TierObject

    tiers = stack(place, checksum_key=SECRET)
    assert tiers.store([key(1)], [payload(1)])
    (name,) = place.names()
    data = bytearray(place.read(name))
    data[HEADER.size : HEADER.size + 4] = b"evil"
    forger = TierObject(ROOT, None)
    forger.seal(memoryview(data), bytes(data[8:40]), PAYLOAD_BYTES)
    assert forger.payload(memoryview(data), bytes(data[8:40]), len(data)) is not None
    place.write(name, bytes(data))
    assert fetched(tiers, 1) is None and counted(tiers)["checksum_failures"] == 1
    tiers.close()
