"""What a window has left behind does not evict what chats go on from."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.kv_cache.cache_sessions import BLOCK, ask, make_cache, text

WINDOW = 32 * BLOCK
GEMMA = (*[WINDOW] * 5, None)  # five layers with windows, then one of full attention
LENGTH = 2000  # tokens of a chat at its first turn
NEW = 100  # tokens of each further message, and of each answer
NUM_SESSIONS, NUM_TURNS = 8, 4


def hit_rate(share: float, windows: tuple[int | None, ...] = GEMMA, num_sessions: int = NUM_SESSIONS) -> float:
    """Chats in turns, in a cache of which what their next turns need takes `share`. Returns how much of the prompts was found,
    from the second turn on."""
    length = LENGTH + 2 * NEW * NUM_TURNS
    needed = sum(min(window or length, length) // BLOCK for window in windows)
    cache = make_cache(int(num_sessions * needed / share), windows)
    chats = [text(session, LENGTH) for session in range(num_sessions)]
    found = total = 0
    for turn in range(NUM_TURNS):
        for session, prompt in enumerate(chats):
            answer = text(1000 + 10 * session + turn, NEW)
            num_found = ask(cache, prompt, answer)
            if turn:
                found, total = found + num_found, total + len(prompt)
            chats[session] = np.concatenate([prompt, answer, text(2000 + 10 * session + turn, NEW)])
    cache.check_integrity([])
    return found / total


@pytest.mark.parametrize("share", [0.42, 0.7])
def test_sessions_whose_next_turns_fit_are_found(share: float) -> None:
    """Before, 0.96 with 42 % of the cache, and 0.00 from 60 % on."""
    assert hit_rate(share) >= 0.95


def test_a_shared_beginning_outlives_prompts_that_come_once() -> None:
    """A system prompt longer than the window. Between two users of it there are prompts that fill the cache."""
    cache, system = make_cache(1400, GEMMA), text(0, 800)
    found = []
    for user in range(8):
        found.append(ask(cache, np.concatenate([system, text(10 + user, 60)]), text(50 + user, 20)))
        for other in range(2):
            ask(cache, text(100 + 10 * user + other, 1500), text(7, 20))
    assert found[2:] == [800] * 6


def test_without_need_of_memory_a_window_that_was_left_behind_is_found() -> None:
    cache, prompt = make_cache(5000, GEMMA), text(0, LENGTH)
    ask(cache, prompt, text(1, NEW))
    assert ask(cache, np.concatenate([prompt[: 50 * BLOCK], text(2, 40)]), text(3, 5)) == 50 * BLOCK
