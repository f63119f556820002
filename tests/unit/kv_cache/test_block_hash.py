"""The chain of block names."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.interface.parts import Content
from inflight.kv_cache.block_hash import BlockHasher


def chain(tokens: list[int], *, fingerprint: str = "m", salt: str = "", block_size: int = 4) -> list[bytes]:
    hasher = BlockHasher(fingerprint, block_size)
    hashes: list[bytes] = []
    hasher.extend(hasher.root(salt), hashes, np.array(tokens, dtype=np.int32), len(tokens) // block_size)
    return hashes


def test_equal_beginnings_have_equal_names_and_nothing_else_has() -> None:
    base = chain(list(range(12)))
    assert chain([*range(8), 99, 9, 10, 11])[:2] == base[:2]
    assert chain([*range(8), 99, 9, 10, 11])[2] != base[2]
    assert chain([99, *range(1, 12)])[1] != base[1]  # same second block, other beginning
    assert all(len(name) == 32 for name in base)


def test_model_and_salt_are_part_of_the_name() -> None:
    tokens = list(range(4))
    names = {chain(tokens, fingerprint=f, salt=s)[0] for f, s in [("m", ""), ("n", ""), ("m", "a"), ("ma", "")]}
    assert len(names) == 4


def test_extending_goes_on_where_it_stopped() -> None:
    hasher, tokens = BlockHasher("m", 4), np.arange(16, dtype=np.int32)
    hashes: list[bytes] = []
    for count in (1, 2, 2, 4):
        hasher.extend(hasher.root(""), hashes, tokens, count)
    assert hashes == chain(list(range(16)))


def test_the_tokens_of_named_blocks_may_be_left_out() -> None:
    hasher, tokens = BlockHasher("m", 4), np.arange(20, dtype=np.int32)
    hashes = chain(list(range(12)))
    for count in (2, 3):  # they are named
        hasher.extend(hasher.root(""), hashes, tokens[12:], count, first_token=12)
    assert hashes == chain(list(range(12)))
    hasher.extend(hasher.root(""), hashes, tokens[12:], 5, first_token=12)
    assert hashes == chain(list(range(20)))
    hashes = hashes[:2]
    with pytest.raises(AssertionError):
        hasher.extend(hasher.root(""), hashes, tokens[12:], 5, first_token=12)  # block 2 is needed, too


@pytest.mark.parametrize(("count", "num_names"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_names_that_a_front_end_asks_for_are_those_before_the_last_token(count: int, num_names: int) -> None:
    tokens = list(range(count))
    names = BlockHasher("m", 4).names("a", np.array(tokens, dtype=np.int32))
    assert names == b"".join(chain(tokens, salt="a")[:num_names])


def named(*contents: Content, length: int = 16) -> list[bytes]:
    hasher = BlockHasher("m", 4)
    hashes: list[bytes] = []
    hasher.extend(hasher.root("", contents), hashes, np.zeros(length, dtype=np.int32), length // 4)
    return hashes


def test_contents_change_the_names_of_their_blocks_and_of_all_later_ones() -> None:
    plain, one = named(), named(Content(5, 7, b"a" * 32))
    assert one[0] == plain[0] and not set(one[1:]) & set(plain)
    assert named(Content(5, 7, b"a" * 31 + b"b"))[1] != one[1]
    assert named(Content(6, 7, b"a" * 32))[1] != one[1]  # at another place of the block


def test_a_content_over_several_blocks_is_told_by_each_of_them() -> None:
    long, two = named(Content(2, 14, b"a" * 32)), named(Content(2, 7, b"a" * 32), Content(7, 14, b"b" * 32))
    assert long[0] == two[0] and not set(long[1:]) & set(two)
    # the same tokens at the same place of the block, but another part of the content
    later = named(Content(0, 8, b"a" * 32))
    assert len(set(later)) == 4


def test_every_way_to_extend_tells_the_same_contents() -> None:
    contents = (Content(1, 6, b"a" * 32), Content(9, 10, b"b" * 32))
    hasher, tokens = BlockHasher("m", 4), np.zeros(17, dtype=np.int32)
    hashes: list[bytes] = []
    for count in (1, 3):
        hasher.extend(hasher.root("", contents), hashes, tokens, count)
    hasher.extend(hasher.root("", contents), hashes, tokens[12:], 4, first_token=12)
    assert hashes == named(*contents)
    assert hasher.names("", tokens, contents) == b"".join(hashes)
