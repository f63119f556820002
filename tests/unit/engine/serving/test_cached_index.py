"""`CachedIndex`: it says of a prompt what the engine would find, whatever kinds of layers the model has."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.engine.process.outbox import _name_messages
from inflight.engine.serving.cached_index import CachedIndex
from inflight.engine.serving.engine_client import EngineState
from inflight.engine.serving.routing import Router
from inflight.interface.kv_cache import KVCacheSpec
from inflight.interface.request import Int32Array
from inflight.interface.serving import CachedBlocks
from inflight.kv_cache.block_hash import BlockHasher
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.reported_names import ReportedNames
from tests.unit.kv_cache.cache_sessions import BLOCK, STATE, ask, make_cache, text
from tests.unit.scheduler.transfer_bench import Bench, clock

__all__ = ["clock"]  # a fixture

WINDOW = 4 * BLOCK
MODELS: dict[str, tuple[int | None, ...]] = {
    "attention": (None,),
    "hybrid": (STATE, STATE, None),
    "windows": (WINDOW, WINDOW, None),
    "windows only": (WINDOW,),
    "two windows": (WINDOW, 2 * WINDOW, None),
    "states and windows": (STATE, WINDOW, None),
}
HASHER = BlockHasher("m", BLOCK)


class Watched:
    """A cache, and the index that follows its reports."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache, self.reported, self.index = cache, ReportedNames(cache), CachedIndex()
        self.index.apply(CachedBlocks(stored=b"", removed=b"", is_first=True, kinds=self.reported.kinds))

    def told(self, prompt: Int32Array) -> int:
        """How many tokens of the prompt the index says are cached."""
        for message in _name_messages(self.reported.take(), False):
            self.index.apply(message)
        return self.index.num_cached(HASHER.names("", prompt)) * BLOCK


def drawn_prompts(draw: random.Random, count: int) -> list[Int32Array]:
    """Users of some system prompts and documents, chats that go on, and prompts that come once."""
    systems = [text(i, draw.randrange(20, 500)) for i in range(3)]
    prompts: list[Int32Array] = []
    for i in range(count):
        kind = draw.random()
        if kind < 0.3 and prompts:  # the next message of a chat, or the same prompt again
            prompts.append(
                np.concatenate([draw.choice(prompts[-6:])[:1400], text(1000 + i, draw.choice([0, 30, 200]))])
            )
        elif kind < 0.8:
            prompts.append(np.concatenate([draw.choice(systems), text(1000 + i, draw.randrange(1, 120))]))
        else:
            prompts.append(text(1000 + i, draw.randrange(1, 700)))
    return prompts


@pytest.mark.parametrize("model", MODELS)
def test_the_index_says_what_the_engine_finds(model: str) -> None:
    """10 drawn caches, most of them too small, with 25 prompts each. Before, it followed the blocks of full attention only."""
    total_found = 0
    for seed in range(10):
        draw = random.Random(f"{model} {seed}")
        watched = Watched(make_cache(draw.choice([320, 500, 900, 4000]), MODELS[model]))
        for prompt in drawn_prompts(draw, 25):
            told = watched.told(prompt)
            found = ask(watched.cache, prompt, text(draw.randrange(100), draw.randrange(1, 60)))
            assert told == found, (seed, len(prompt))
            total_found += found
            if draw.random() < 0.02:
                watched.cache.reset_prefix_cache([])
    assert total_found > 0


SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32", "itemsize": 4}


class HostPoolReplica:
    """An engine with a host pool, whose copies end at once."""

    def __init__(self, windows: tuple[int | None, ...], num_blocks: int, num_slots: int) -> None:
        specs = [
            KVCacheSpec.of_state(BLOCK, 16) if window == STATE else KVCacheSpec(**SHAPE, sliding_window=window)
            for window in windows
        ]
        self.bench = Bench(block_size=BLOCK, specs=specs, num_blocks=num_blocks, num_slots=num_slots)
        self.watched = Watched(self.bench.kv_cache)
        for names in self.watched.reported.names:
            names.add(self.bench.transfers.host_pool)

    def ask(self, prompt: Int32Array, answer: Int32Array) -> int:
        """Returns how many tokens of the prompt were found."""
        bench = self.bench
        request = bench.request(np.concatenate([prompt, answer]), len(prompt))
        bench.transfers.begin(request, len(prompt) - 1)
        self._end_calls()
        blocks, tokens = request.blocks, request.token_ids
        computed = bench.kv_cache.get_computed_blocks(blocks, prompt)
        assert bench.kv_cache.allocate_slots(blocks, len(tokens), computed) is not None
        blocks.num_committed = len(computed[0])
        if bench.kv_cache.has_full_blocks(blocks, len(tokens)):
            bench.kv_cache.commit(blocks, tokens, len(tokens))
            bench.transfers.record_committed(request, 0)
            bench.transfers.end_step(1, 1, 0.0)
            self._end_calls()
        has_last_state = bench.kv_cache.name_last_state(blocks)
        bench.transfers.record_release(request, has_last_state=has_last_state)
        bench.transfers.end_step(1, 1, 0.0)
        self._end_calls()
        bench.kv_cache.free(blocks)
        return len(computed[0]) * BLOCK

    def _end_calls(self) -> None:
        while self.bench.calls:
            self.bench.end(self.bench.calls[0].action, True)


@pytest.mark.parametrize("model", MODELS)
def test_the_index_says_what_the_engine_finds_in_arena_and_host_pool(model: str) -> None:
    for seed in range(3):
        draw = random.Random(f"host pool {model} {seed}")
        replica = HostPoolReplica(MODELS[model], draw.choice([450, 900]), draw.choice([300, 2000]))
        for prompt in drawn_prompts(draw, 25):
            told = replica.watched.told(prompt)
            found = replica.ask(prompt, text(draw.randrange(100), draw.randrange(1, 60)))
            assert told == found, (seed, len(prompt))
        replica.bench.check_idle()


# -- two replicas, requests one after another -----------------------------------------------------------------------------


class Replicas:
    def __init__(self, windows: tuple[int | None, ...], num_blocks: int, num_slots: int) -> None:
        self.replicas = [HostPoolReplica(windows, num_blocks, num_slots) for _ in range(2)]
        lengths = SimpleNamespace(work_of=lambda request: 50)
        idle = SimpleNamespace(check=lambda *size: None, load=0, lengths=lengths)
        engines = [
            SimpleNamespace(
                index=i,
                number=i,
                cached=replica.watched.index,
                admission=idle,
                is_connected=True,
                makes_steps=True,
                state=EngineState.CONNECTED,
            )
            for i, replica in enumerate(self.replicas)
        ]
        self.router = Router(cast("Any", engines), BLOCK)  # Any: stand-ins

    def ask(self, prompt: Int32Array, answer: Int32Array, rank: int | None) -> int:
        """Returns how many tokens were found. `rank`: None lets the router choose."""
        for replica in self.replicas:
            replica.watched.told(prompt)
        names = HASHER.names("", prompt)
        request: Any = SimpleNamespace(
            request_id=str(prompt[-1]), sequences=[0], prompt_token_ids=prompt.tolist(), block_names=names
        )
        (engine,) = self.router.place([request], rank)
        return self.replicas[engine.index].ask(prompt, answer)


def chats(replicas: Replicas, num_chats: int, length: int, num_others: int, *, pinned: bool) -> int:
    """Chats of 4 turns in turns, and behind each turn prompts that come once. Returns how many tokens were found."""
    prompts, found, once = [text(i, length) for i in range(num_chats)], 0, 10_000
    for turn in range(4):
        for i, prompt in enumerate(prompts):
            answer = text(100 + 10 * i + turn, 40)
            found += replicas.ask(prompt, answer, i % 2 if pinned else None)
            prompts[i] = np.concatenate([prompt, answer, text(1000 + 10 * i + turn, 40)])
            for _ in range(num_others):
                once += 1
                replicas.ask(text(once, 600), text(7, 10), once % 2 if pinned else None)
    return found


@pytest.mark.parametrize("num_slots", [20, 2400])
@pytest.mark.parametrize("model", ["hybrid", "windows", "windows only"])
def test_routed_chats_find_what_pinned_ones_find(model: str, num_slots: int) -> None:
    """Without a host pool to speak of, and with one that has most of what 12 chats need."""
    shape = (MODELS[model], 1600 if num_slots == 20 else 330, num_slots)
    num_chats, num_others = (4, 1) if num_slots == 20 else (12, 0)
    routed, pinned = (
        chats(Replicas(*shape), num_chats, 1000, num_others, pinned=is_pinned) for is_pinned in (False, True)
    )
    assert pinned > 2.5 * num_chats * 1000
    assert routed >= 0.98 * pinned


@pytest.mark.parametrize("model", MODELS)
def test_users_of_a_system_prompt_find_it_wherever_they_are_sent(model: str) -> None:
    replicas, system = Replicas(MODELS[model], 3000, 20), text(0, 400)
    found = [replicas.ask(np.concatenate([system, text(1 + i, 60)]), text(100 + i, 20), None) for i in range(24)]
    assert sum(each >= 400 for each in found) >= 19
