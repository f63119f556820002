"""The cache of processed images: what it evicts, and which uuids it knows."""

from __future__ import annotations

import random

import numpy as np

from inflight.multimodal.cache import ENTRY_BYTES, ImageCache, ImageName
from inflight.multimodal.processed import ProcessedImage, ProcessedInput


def image_of(num_numbers: int) -> ProcessedImage:
    pixels = np.zeros((1, num_numbers), dtype=np.float32)
    part = ProcessedInput(pixels=pixels, grid=(1, 1, 1), num_tokens=1, digest=bytes(32))
    return ProcessedImage(placeholder="<image>", expansion="", inputs=(part,))


def name_of(uuid: str, salt: str = "", options: bytes = b"") -> ImageName:
    return ImageName(uuid, salt, options)


def test_the_image_that_was_not_used_for_the_longest_time_is_evicted() -> None:
    image = image_of(1000)
    cache = ImageCache(3 * (4000 + ENTRY_BYTES))
    for key in (b"a", b"b", b"c"):
        cache.put(key, image)
    assert cache.get(b"a") is image
    cache.put(b"d", image)
    assert [cache.get(key) is image for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.num_bytes == cache.max_bytes


def test_an_image_that_is_larger_than_the_cache_evicts_nothing() -> None:
    cache = ImageCache(10_000)
    cache.put(b"a", image_of(1000))
    cache.put(b"b", image_of(3000))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


def test_a_uuid_is_valid_for_its_salt_and_options_only() -> None:
    cache = ImageCache(10**6)
    cache.put(b"a", image_of(10), name_of("x", "salt", b"options"))
    assert cache.get_named(name_of("x", "salt", b"options")) is not None
    assert cache.get_named(name_of("x", "", b"options")) is None
    assert cache.get_named(name_of("x", "salt", b"others")) is None


def test_a_uuid_that_is_given_to_another_image_names_that_one() -> None:
    first, second = image_of(10), image_of(20)
    cache = ImageCache(10**6)
    cache.put(b"a", first, name_of("x"))
    cache.put(b"b", second)
    assert cache.get(b"b", name_of("x")) is second
    assert cache.get_named(name_of("x")) is second
    assert cache.get(b"a") is first


def test_a_uuid_is_forgotten_with_its_image() -> None:
    cache = ImageCache(2 * (4000 + 2 * ENTRY_BYTES))
    cache.put(b"a", image_of(1000), name_of("x"))
    cache.put(b"b", image_of(1000), name_of("y"))
    cache.put(b"c", image_of(1000), name_of("z"))
    assert cache.get_named(name_of("x")) is None
    assert cache.get_named(name_of("y")) is not None


def test_names_count_as_memory() -> None:
    cache = ImageCache(100 * ENTRY_BYTES)
    cache.put(b"a", image_of(10))
    for number in range(1000):
        cache.get(b"a", name_of(str(number)))
        cache.put(b"a", image_of(10), name_of(str(number)))
        assert cache.num_bytes <= cache.max_bytes
    assert len(cache._keys) <= 100


def test_the_memory_is_counted_exactly() -> None:
    rng = random.Random(0)
    cache = ImageCache(40_000)
    for _ in range(3000):
        key, name = bytes([rng.randrange(20)]), name_of(str(rng.randrange(10)))
        match rng.randrange(4):
            case 0:
                cache.get(key, rng.choice([None, name]))
            case 1:
                cache.get_named(name)
            case _:
                cache.put(key, image_of(100 * key[0]), rng.choice([None, name]))
        entries = cache._entries
        assert cache.num_bytes == sum(each.num_bytes for each in entries.values()) <= cache.max_bytes
        assert {name: key for key, each in entries.items() for name in each.names} == cache._keys


def test_nothing_is_cached_without_memory() -> None:
    cache = ImageCache(0)
    cache.put(b"a", image_of(0), name_of("x"))
    assert cache.get(b"a") is None
    assert cache.get_named(name_of("x")) is None
