"""`TierObject`: only the whole, undamaged object of the name verifies."""

from __future__ import annotations

import hashlib

import pytest

from inflight.kv_connector.tier_object import HEADER, MAGIC, PAGE, TierObject, padded

ROOT = bytes(range(32))
KEY = b"k" * 33
SECRET = "sixteen characters"


@pytest.fixture(params=[None, SECRET])
def sealed(request: pytest.FixtureRequest) -> TierObject:
    return TierObject(ROOT, request.param)


def make(sealed: TierObject, payload: bytes, name: bytes) -> bytearray:
    """A buffer with two more pages than the object needs."""
    data = bytearray(b"\xff" * (padded(len(payload)) + 2 * PAGE))
    data[HEADER.size : HEADER.size + len(payload)] = payload
    sealed.seal(memoryview(data), name, len(payload))
    return data


@pytest.mark.parametrize("length", [0, 1, PAGE - HEADER.size, PAGE - HEADER.size + 1, 3 * PAGE])
def test_round_trip(sealed: TierObject, length: int) -> None:
    name = sealed.name(KEY)
    payload = hashlib.shake_128(b"x").digest(length)
    data = make(sealed, payload, name)
    end = padded(length)
    assert end % PAGE == 0 and HEADER.size + length <= end < HEADER.size + length + PAGE
    assert data[:8] == MAGIC and data[8:40] == name and int.from_bytes(data[40:48], "little") == length
    assert data[HEADER.size + length :] == bytes(end - HEADER.size - length) + b"\xff" * 2 * PAGE
    found = sealed.payload(memoryview(data), name, end)
    assert found is not None and found == payload


def test_every_flipped_byte_is_found(sealed: TierObject) -> None:
    name = sealed.name(KEY)
    data = make(sealed, bytes(300), name)
    for place in range(HEADER.size + 300):
        data[place] ^= 1 << place % 8
        assert sealed.payload(memoryview(data), name, PAGE) is None, place
        data[place] ^= 1 << place % 8
    assert sealed.payload(memoryview(data), name, PAGE) is not None


def test_wrong_lengths_are_found(sealed: TierObject) -> None:
    name = sealed.name(KEY)
    data = memoryview(make(sealed, bytes(PAGE), name))
    for length in (0, -1, PAGE, 2 * PAGE - 1, 2 * PAGE + 1, 4 * PAGE, 2**70, None, "8192", 2.5):
        assert sealed.payload(data, name, length) is None
    assert sealed.payload(data[:PAGE], name, 2 * PAGE) is None
    assert sealed.payload(data, name, 2 * PAGE) is not None


def test_objects_of_other_names_roots_and_secrets() -> None:
    objects = [TierObject(root, secret) for root in (ROOT, ROOT[::-1]) for secret in (None, SECRET, SECRET + "!")]
    names = [each.name(key) for each in objects for key in (KEY, KEY + b"\0")]
    assert len(set(names)) == 12 and {len(name) for name in names} == {32}
    data = [memoryview(make(each, b"same", name)) for each in objects for name in names]
    verified = [
        (number, name, place)
        for number, each in enumerate(objects)
        for name in names
        for place, one in enumerate(data)
        if each.payload(one, name, PAGE) is not None
    ]
    # A digest verifies with its own secret only, under the name that is written in the object. Roots are in the names.
    assert all(place % 12 == names.index(name) and place // 12 % 3 == number % 3 for number, name, place in verified)
    assert len(verified) == 6 * 12 * 2
