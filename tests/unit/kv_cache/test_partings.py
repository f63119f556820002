"""A beginning that many prompts share is found by models with windows or states as by full attention, from the third one on."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.cache_sessions import BLOCK, STATE, admit, ask, finish, make_cache, text

WINDOW = 20 * BLOCK
HYBRID, WINDOWED, ATTENTION = (None, STATE, STATE, STATE), (None, *[WINDOW] * 5), (None,)
ROOM = 6000  # nothing is evicted


def ask_users(cache: KVCacheManager, shared: int, num_users: int = 24) -> int:
    """Each prompt has the same beginning and another end."""
    beginning = text(0, shared)
    prompts = [np.concatenate([beginning, text(1 + user, 90)]) for user in range(num_users)]
    num_found = sum(ask(cache, prompt, text(1000 + user, 40)) for user, prompt in enumerate(prompts))
    cache.check_integrity([])
    return num_found


@pytest.mark.parametrize(
    ("windows", "shared"),
    [
        *[(windows, shared) for windows in (HYBRID, WINDOWED) for shared in (100, 400, 1000, 1500)],
        *[(HYBRID, 511), ((STATE, None), 520), ((WINDOW, None), 900)],
    ],
)
def test_a_shared_beginning_is_found_as_by_attention(windows: tuple[int | None, ...], shared: int) -> None:
    """Before, the hybrids found 0 of up to 500 tokens, and half of 1,000."""
    found, by_attention = (ask_users(make_cache(ROOM, each), shared) for each in (windows, ATTENTION))
    assert by_attention == 23 * (shared // BLOCK) * BLOCK
    assert found >= 0.95 * by_attention


@pytest.mark.parametrize("windows", [HYBRID, WINDOWED])
def test_of_prompts_that_run_together_the_second_one_keeps_what_the_others_need(
    windows: tuple[int | None, ...],
) -> None:
    cache, beginning = make_cache(ROOM, windows), text(0, 400)
    prompts = [np.concatenate([beginning, text(1 + user, 90)]) for user in range(12)]
    running = [admit(cache, prompt)[0] for prompt in prompts[:2]]
    for blocks, prompt in zip(running, prompts, strict=False):
        finish(cache, blocks, prompt, len(prompt))
    assert [ask(cache, prompt, text(99, 5)) for prompt in prompts[2:]] == [400] * 10


def test_two_levels_of_shared_beginnings_are_learned() -> None:
    """A system prompt for all, and a document for each of three groups of users."""
    cache, system = make_cache(ROOM, HYBRID), text(0, 320)
    found = []
    for user in range(18):
        document = text(1 + user % 3, 640)
        found.append(ask(cache, np.concatenate([system, document, text(50 + user, 70)]), text(100 + user, 20)))
    assert found[3:6] == [320] * 3 or all(each >= 320 for each in found[3:6])
    assert found[6:] == [960] * 12


@pytest.mark.parametrize("windows", [HYBRID, WINDOWED])
def test_turns_with_tool_calls_go_on_from_the_end_of_each_call(windows: tuple[int | None, ...]) -> None:
    """Also if several requests go on from the same call, with different results."""
    cache, prompt = make_cache(ROOM, windows), text(0, 700)
    for turn in range(6):
        call = text(10 + turn, 45)
        ask(cache, prompt, call)
        longer = np.concatenate([prompt, call])
        at_most = (len(longer) - 1) // BLOCK * BLOCK
        found = [ask(cache, np.concatenate([longer, text(100 + 10 * turn + i, 60)]), text(7, 20)) for i in range(3)]
        assert min(found) >= at_most - BLOCK, turn
        prompt = np.concatenate([longer, text(100 + 10 * turn, 60)])


@pytest.mark.parametrize("windows", [HYBRID, WINDOWED])
def test_a_chat_keeps_nothing_at_the_end_of_an_earlier_answer(windows: tuple[int | None, ...]) -> None:
    cache, prompt = make_cache(ROOM, windows), text(0, 500)
    for turn in range(4):
        blocks, num_found = admit(cache, prompt)
        assert blocks.num_shared == 0, "it goes on from an answer"
        assert bool(num_found) == bool(turn)
        longer = np.concatenate([prompt, text(10 + turn, 50)])
        finish(cache, blocks, longer, len(prompt))
        prompt = np.concatenate([longer, text(20 + turn, 30)])


def test_a_parting_is_looked_for_once() -> None:
    """A request that waits for room is looked at in each plan, and must not find itself."""
    cache, prompt = make_cache(ROOM, HYBRID), text(0, 300)
    ask(cache, prompt, text(1, 10))
    other = np.concatenate([prompt[:160], text(2, 200)])
    blocks = cache.new_request("", len(other))
    for _ in range(3):
        cache.get_computed_blocks(blocks, other)
        assert blocks.num_shared == 10


def test_states_at_partings_take_little_memory() -> None:
    """24 users: one more state than without, in each group of states."""
    cache = make_cache(ROOM, HYBRID)
    ask_users(cache, 300)
    by_group = [0] * len(HYBRID)
    for _, group in cache.pool.cached_keys():
        by_group[group] += 1
    # at the end of each prompt and of each answer; and one where they part
    assert by_group[1:] == [2 * 24 + 1] * 3
    assert 0.05 * sum(by_group) >= 3


def test_only_the_newest_names_are_remembered() -> None:
    cache = make_cache(40, (None, STATE))
    for seed in range(20):
        ask(cache, text(seed, 300), text(seed, 3))
    assert cache._partings is not None
    assert 0 < len(cache._partings._seen) <= 41 and len(cache._partings._ends) <= 41
