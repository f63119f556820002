"""A subscriber that applies the events knows exactly the blocks without a salt that are in the prefix cache."""

from __future__ import annotations

import random

import msgspec
import numpy as np

from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.kv_cache.block_events import BlockEvents
from inflight.kv_cache.block_hash import BlockHasher
from inflight.kv_cache.manager import KVCacheManager
from tests.support.kv_event_stream import AllBlocksCleared, BlocksRemoved, BlockStored

SIZE = 4
FULL = KVCacheSpec(block_size=SIZE, num_kv_heads=1, head_dim=8, dtype="float32", itemsize=4)
WINDOW = KVCacheSpec(block_size=SIZE, num_kv_heads=1, head_dim=8, dtype="float32", itemsize=4, sliding_window=6)


def manager(num_blocks: int, *specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroup(layer_names=(str(index),), spec=spec) for index, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, block_bytes=FULL.block_bytes, groups=groups)
    return KVCacheManager(config, fingerprint="model", enable_prefix_caching=True)


Event = BlockStored | BlocksRemoved | AllBlocksCleared


def taken(events: BlockEvents) -> list[Event]:
    """The newest events, as a subscriber of vLLM reads them."""
    return msgspec.convert(events.take(), list[Event])


class Subscriber:
    """Knows what is cached from the events alone: number of a block -> all tokens up to its end."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def apply(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    before = [] if event.parent_block_hash is None else self.tokens.get(event.parent_block_hash, [])
                    for index, number in enumerate(event.block_hashes):
                        before = [*before, *event.token_ids[index * SIZE : (index + 1) * SIZE]]
                        assert number not in self.tokens, "it is told once"
                        self.tokens[number] = before
                case BlocksRemoved():
                    for number in event.block_hashes:
                        del self.tokens[number]
                case AllBlocksCleared():
                    self.tokens.clear()


def number_of(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")


def hasher_names(hasher: BlockHasher, tokens: np.ndarray) -> list[bytes]:
    """The names of all whole blocks."""
    names: list[bytes] = []
    hasher.extend(hasher.root(""), names, tokens, len(tokens) // SIZE)
    return names


def test_a_subscriber_knows_what_is_cached() -> None:
    """Prompts with common beginnings, more than the cache holds, salts, preemption in the middle, and resets."""
    draw = random.Random(5)
    for specs in ((FULL,), (FULL, WINDOW)):
        cache, subscriber = manager(40, *specs), Subscriber()
        events, hasher = cache.watch_blocks(), BlockHasher("model", SIZE)
        public: dict[int, list[int]] = {}  # the blocks of all prompts without a salt
        num_told = num_removed = 0
        for _ in range(300):
            length, salt = draw.randint(1, 40), draw.choice(["", "", "", "secret"])
            tokens = np.array([draw.randint(0, 1) * (i // 8) + i for i in range(length)], np.int32)
            blocks = cache.new_request(salt, length)
            computed = cache.get_computed_blocks(blocks, tokens)
            done = len(computed[0]) * SIZE
            end = draw.randint(done, length)
            assert cache.allocate_slots(blocks, length, computed) is not None
            while done < end:
                done = min(end, done + draw.randint(1, 9))
                if cache.has_full_blocks(blocks, done):
                    first = cache.num_known_tokens(blocks)
                    cache.commit(blocks, tokens[first:], done, first_token=first)
            cache.free(blocks)
            if draw.random() < 0.02:
                cache.reset_prefix_cache(())
            happened = taken(events)
            num_told += sum(len(each.block_hashes) for each in happened if isinstance(each, BlockStored))
            num_removed += sum(len(each.block_hashes) for each in happened if isinstance(each, BlocksRemoved))
            subscriber.apply(happened)
            for index, name in enumerate(hasher_names(hasher, tokens) if not salt else ()):
                public[number_of(name)] = tokens[: (index + 1) * SIZE].tolist()
            cached = {number_of(name) for name, group in cache.pool.cached_keys() if group == 0}
            assert set(subscriber.tokens) == cached & set(public)
            # with windows, the block before a block may have left the cache when the block was told
            assert len(specs) > 1 or all(public[number] == known for number, known in subscriber.tokens.items())
        assert num_told > 100 and num_removed > 50


def test_no_more_than_the_salted_blocks_is_left_out() -> None:
    cache, subscriber = manager(40, FULL), Subscriber()
    events = cache.watch_blocks()
    for salt in ("", "secret", ""):
        tokens = np.arange(21, dtype=np.int32)
        blocks = cache.new_request(salt, len(tokens))
        computed = cache.get_computed_blocks(blocks, tokens)
        assert cache.allocate_slots(blocks, len(tokens), computed) is not None
        cache.commit(blocks, tokens, len(tokens))
        cache.free(blocks)
        subscriber.apply(taken(events))
        assert sorted(map(len, subscriber.tokens.values())) == [4, 8, 12, 16, 20]
    assert len(cache.pool.cached_keys()) == 10


def test_names_that_are_known_are_not_computed_again_unless_tokens_are_told() -> None:
    tokens = np.arange(21, dtype=np.int32)
    cache = manager(40, FULL)
    blocks = cache.new_request("", len(tokens))
    cache.get_computed_blocks(blocks, tokens)
    assert cache.num_known_tokens(blocks) == 20
    cache.watch_blocks()
    assert cache.num_known_tokens(blocks) == 0


def test_blocks_that_were_loaded_are_told_with_their_parents() -> None:
    """They join the cache without a commit, before the request is admitted."""
    cache, subscriber, tokens = manager(40, FULL), Subscriber(), np.arange(21, dtype=np.int32)
    events = cache.watch_blocks()
    for salt, num_told in (("secret", 0), ("", 5)):
        blocks = cache.new_request(salt, len(tokens))
        cache.name_blocks(blocks, tokens)
        for index, name in enumerate(blocks.hashes):
            (block_id,) = cache.pool.allocate(1)
            cache.pool.register(block_id, (name, 0))
            cache.pool.free([block_id])
            cache.record_loaded(blocks, index + 1, tokens)
        subscriber.apply(taken(events))
        assert sorted(map(len, subscriber.tokens.values())) == [4, 8, 12, 16, 20][:num_told]


def test_of_several_groups_that_of_full_attention_is_told() -> None:
    """Blocks that a window has left behind may be evicted, and nobody misses them."""
    cache, tokens = manager(40, WINDOW, FULL), np.arange(21, dtype=np.int32)
    events, names = cache.watch_blocks(), cache.watch_names()
    blocks = cache.new_request("", len(tokens))
    assert cache.allocate_slots(blocks, len(tokens)) is not None
    cache.commit(blocks, tokens, len(tokens))
    cache.free(blocks)
    (left,) = cache.pool.allocate(cache.pool.num_free_blocks - 9)[-1:]
    assert left and len(taken(events)) == 5 and names.present() == dict.fromkeys(blocks.hashes, True)
