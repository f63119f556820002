"""Several blocks in one object (`blocks_per_chunk`): what is stored, what is read, and what a damaged object costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest
from obstore.store import from_url

from inflight.config.kv_tiers import KVTierConfig
from inflight.kv_connector import object_store_tier
from inflight.kv_connector.tier_object import PAGE, padded
from inflight.kv_connector.tier_stack import TierStack
from tests.support.kv_tier_servers import direct_store, new_bucket

SIZE = 4  # blocks of a chunk
PAYLOAD_BYTES = PAGE
BLOCK_BYTES = padded(PAYLOAD_BYTES)  # in an object
KEYS = [b"%d" % i * 33 for i in range(SIZE)]
PAYLOADS = [memoryview(b"%d" % i * PAYLOAD_BYTES) for i in range(SIZE)]
ALL = range(SIZE)


def custom(name: str = "DictTier", seconds: float = 300.0, size: int = SIZE, **options: Any) -> KVTierConfig:
    """A tier in memory. Users give the setting to obj tiers only."""
    path = f"tests.support.kv_tier_examples:{name}"
    return KVTierConfig(
        type="custom", module_path=path, options=options, timeout_seconds=seconds, blocks_per_chunk=size
    )


def stack(*configs: KVTierConfig) -> TierStack:
    return TierStack(configs, root=b"r" * 32, shard="s", num_shards=1, payload_bytes=PAYLOAD_BYTES)


def read(tiers: TierStack, places: range = ALL, chunk: bytes = KEYS[-1]) -> list[int | None]:
    """Asks for these blocks of the chunk. Returns for each one the number of the tier that had it."""
    found = tiers.fetch([KEYS[i] for i in places], places, chunk)
    for i, each in zip(places, found, strict=True):
        assert each is None or each[0] == PAYLOADS[i]
    return [None if each is None else each[1] for each in found]


def counted(tiers: TierStack, label: str = "custom") -> dict[str, float]:
    counts = tiers.take_counts()[label]
    return {name: n for name, n in counts.items() if n and name not in ("read_seconds", "written_seconds")}


class Store(NamedTuple):
    config: KVTierConfig
    names: Callable[[], list[str]]
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], object]
    delete: Callable[[str], object]


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An obj tier, and direct access to its objects."""
    if request.param == "file":
        (tmp_path / "kv").mkdir()
        url, options = f"file://{tmp_path}/kv", None
        yield _store(url, options, from_url(url))
    else:
        options = request.getfixturevalue("s3")
        bucket = new_bucket(options)
        url = f"s3://{bucket}/prefix"
        yield _store(url, options, direct_store(url, options))


def _store(url: str, options: dict[str, Any] | None, place: Any) -> Store:
    config = KVTierConfig(type="obj", url=url, options=options, timeout_seconds=300.0, blocks_per_chunk=SIZE)
    return Store(
        config,
        lambda: [each["path"] for batch in obstore.list(place) for each in batch],
        lambda name: bytes(obstore.get(place, name).bytes()),
        lambda name, data: obstore.put(place, name, data),
        lambda name: obstore.delete(place, name),
    )


def test_a_chunk_is_one_object_and_parts_of_it_can_be_read(store: Store) -> None:
    tiers = stack(store.config)
    assert read(tiers) == [None] * SIZE
    assert tiers.store(KEYS, PAYLOADS) and tiers.store(KEYS, PAYLOADS)
    (name,) = store.names()
    assert len(store.read(name)) == SIZE * BLOCK_BYTES
    counted(tiers, "obj")
    for places in (ALL, range(1), range(1, 3), range(SIZE - 1, SIZE)):
        assert read(tiers, places) == [0] * len(places)
        assert counted(tiers, "obj") == {"hits": len(places), "read_bytes": len(places) * BLOCK_BYTES}
    assert read(tiers, chunk=b"") == [None] * SIZE  # a shorter prompt does not know the name
    assert read(tiers, chunk=b"other" * 7) == [None] * SIZE
    tiers.close()
    again = stack(store.config)  # after a restart
    assert read(again) == [0] * SIZE
    again.close()


@pytest.mark.parametrize("length", [0, BLOCK_BYTES - 1, 2 * BLOCK_BYTES, SIZE * BLOCK_BYTES - 1])
def test_a_chunk_that_was_cut_short_is_removed_and_stored_again(store: Store, length: int) -> None:
    tiers = stack(store.config)
    assert tiers.store(KEYS, PAYLOADS)
    (name,) = store.names()
    store.write(name, store.read(name)[:length])
    num_whole = length // BLOCK_BYTES
    assert read(tiers, range(SIZE - 1, SIZE)) == [None]  # begins behind the end, or in the middle of the last block
    counts = counted(tiers, "obj")
    assert (counts["checksum_failures"], counts.get("errors"), store.names()) == (1, None, [])
    assert tiers.store(KEYS, PAYLOADS)
    store.write(name, store.read(name)[:length])
    assert read(tiers) == [0] * num_whole + [None] * (SIZE - num_whole)
    assert tiers.store(KEYS, PAYLOADS) and read(tiers) == [0] * SIZE
    tiers.close()


@pytest.mark.parametrize("damaged", [0, 2, SIZE - 1])
def test_of_a_damaged_chunk_the_good_blocks_are_used(store: Store, damaged: int) -> None:
    tiers = stack(store.config)
    assert tiers.store(KEYS, PAYLOADS)
    (name,) = store.names()
    data = bytearray(store.read(name))
    data[damaged * BLOCK_BYTES + 1000] ^= 1
    store.write(name, bytes(data))
    assert read(tiers) == [None if i == damaged else 0 for i in ALL]
    assert counted(tiers, "obj")["checksum_failures"] == 1 and store.names() == []
    tiers.close()


def test_blocks_in_a_wrong_order_are_not_taken_for_each_other() -> None:
    objects: dict[bytes, bytes] = {}
    tiers = stack(custom(objects=objects))
    assert tiers.store(KEYS, PAYLOADS)
    ((name, data),) = objects.items()
    objects[name] = data[BLOCK_BYTES:] + data[:BLOCK_BYTES]
    assert read(tiers) == [None] * SIZE
    tiers.close()


def test_blocks_that_were_stored_alone_are_found() -> None:
    """A request that ends in the middle of a chunk leaves such blocks."""
    objects: dict[bytes, bytes] = {}
    tiers = stack(custom(objects=objects))
    for key, payload in zip(KEYS[:2], PAYLOADS[:2], strict=True):
        assert tiers.store([key], [payload])
    assert len(objects) == 2
    asked = list[bytes]()
    inner: Any = tiers._tiers[0][1]._tier
    get = inner.get
    inner.get = lambda name, into: (asked.append(name), get(name, into))[1]
    assert read(tiers) == [0, 0, None, None]
    assert len(asked) == 3  # the first one that is missing ends the search
    assert read(tiers, range(1), chunk=b"") == [0]
    tiers.close()


def test_a_chunk_with_another_number_of_blocks_has_another_name() -> None:
    objects: dict[bytes, bytes] = {}
    four, two = stack(custom(objects=objects)), stack(custom(objects=objects, size=2))
    assert four.store(KEYS, PAYLOADS) and two.store(KEYS[2:], PAYLOADS[2:])
    assert len(objects) == 2
    assert two.fetch(KEYS[2:], [0, 1], KEYS[-1]) == [(payload, 0) for payload in PAYLOADS[2:]]
    assert read(four) == [0] * SIZE
    four.close()
    two.close()


def test_nearer_tiers_have_single_blocks() -> None:
    near, far = dict[bytes, bytes](), dict[bytes, bytes]()
    tiers = stack(custom(objects=near, size=1), custom(objects=far))
    assert tiers.store(KEYS, PAYLOADS)
    assert (len(near), len(far)) == (SIZE, 1)
    del near[list(near)[1]]
    assert read(tiers) == [0, 1, 0, 0]
    assert tiers.take_counts()["custom-2"]["read_bytes"] == BLOCK_BYTES  # no more than what is missing
    near.clear()
    assert read(tiers) == [1] * SIZE
    found = tiers.fetch(KEYS, ALL, KEYS[-1])
    for key, each in zip(KEYS, found, strict=True):  # as the rank does with hits of a far tier
        assert each is not None and tiers.store([key], [each[0]], each[1])
    assert read(tiers) == [0] * SIZE
    tiers.close()


def test_a_near_hit_between_two_missing_blocks_is_not_overwritten() -> None:
    """Blocks 1 and 3 are missing. What the far tier has behind block 0 is damaged."""
    near, far = dict[bytes, bytes](), dict[bytes, bytes]()
    tiers = stack(custom(objects=near, size=1), custom(objects=far))
    assert tiers.store(KEYS, PAYLOADS)
    names = list(near)
    del near[names[1]], near[names[3]]
    ((name, data),) = far.items()
    far[name] = data[:BLOCK_BYTES] + bytes(len(data) - BLOCK_BYTES)
    assert read(tiers) == [0, None, 0, None]
    tiers.close()


def test_a_late_read_of_a_chunk_cannot_write_into_what_is_returned() -> None:
    near, slow = dict[bytes, bytes](), dict[bytes, bytes]()
    tiers = stack(custom(objects=near, size=1), custom("WaitingTier", 0.01, objects=slow))
    assert not tiers.store(KEYS, PAYLOADS)  # the second is late
    names = list(near)
    del near[names[1]], near[names[3]]
    found = tiers.fetch(KEYS, ALL, KEYS[-1])
    assert [each is not None for each in found] == [True, False, True, False]
    waiting: Any = tiers._tiers[1][1]._tier
    waiting.get_range = lambda name, into, offset: into.__setitem__(slice(None), bytes(len(into)))
    waiting.go.set()
    tiers.close()
    assert [each and each[0] for each in found] == [PAYLOADS[0], None, PAYLOADS[2], None]


def test_a_store_is_asked_whether_a_chunk_that_is_used_is_still_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules of a bucket delete objects by their age, however much they are used."""
    tiers = stack(store.config)
    assert tiers.store(KEYS, PAYLOADS) and tiers.touch(KEYS)
    (name,) = store.names()
    before = store.read(name)
    store.delete(name)
    assert tiers.touch(KEYS), "it looked a moment ago"
    monkeypatch.setattr(object_store_tier, "LOOK_SECONDS", 0.0)
    assert not tiers.touch(KEYS) and not tiers.touch(KEYS[:1])
    assert tiers.store(KEYS, PAYLOADS)
    assert store.names() == [name] and store.read(name) == before
    assert tiers.touch(KEYS) and not tiers.touch(KEYS[:1])
    tiers.close()


def test_only_the_last_looks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store_tier, "LOOKS", 2)
    config = KVTierConfig(type="obj", url="memory:///", blocks_per_chunk=SIZE)
    tiers = stack(config)
    assert tiers.store(KEYS, PAYLOADS)
    for i in range(5):
        assert not tiers.touch([b"%d" % i * 33])
        assert tiers.touch(KEYS)
    tiers.close()
