"""Chats that together need four times the arena: what share of an unbounded cache's hits is left, also after a restart."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kv_tiers.setting import Row, Setting, drain, generate, tell
from inflight.entrypoints.llm_engine import LLMEngine

BAR = 0.95
NUM_AT_ONCE = 2
OUTPUT_LEN = 16
TIMES_THE_ARENA = 4


class Chats:
    """Turns of all chats, one after the other. Each turn is a new message after all that was said before."""

    def __init__(self, setting: Setting, num_chats: int, num_turns: int, message_len: int) -> None:
        self._messages = [[setting.draw(message_len) for _ in range(num_turns)] for _ in range(num_chats)]
        self.length = num_turns * (message_len + OUTPUT_LEN)
        self.total_tokens = num_chats * self.length
        self.num_turns = num_turns

    def begin(self) -> list[list[int]]:
        """What was said so far in each chat."""
        return [[] for _ in self._messages]

    def run(self, engine: LLMEngine, said: list[list[int]], turns: Sequence[int]) -> int:
        """Run these turns. Returns how many prompt tokens were found."""
        num_found = 0
        for turn in turns:
            for first in range(0, len(said), NUM_AT_ONCE):
                chats = range(first, min(first + NUM_AT_ONCE, len(said)))
                for chat in chats:
                    said[chat] += self._messages[chat][turn]
                _, outputs = generate(engine, [said[chat] for chat in chats], OUTPUT_LEN)
                for chat, output in zip(chats, outputs, strict=True):
                    said[chat] += output.outputs[0].token_ids
                    num_found += output.num_cached_tokens
        counts = drain(engine)
        tell(
            "chats", turns=len(turns), found_tokens=num_found, loaded_blocks=counts.num_loaded_blocks, late=counts.num_late,
            fetched_blocks=counts.num_fetched_blocks, skipped_saves=counts.num_skipped_saves,
        )  # fmt: skip
        return num_found


def rows(setting: Setting, *, is_quick: bool) -> list[Row]:
    chats = Chats(setting, 12, 4, 32 if is_quick else 96)
    arena, host_pool, max_model_len = chats.total_tokens // TIMES_THE_ARENA, 2 * chats.total_tokens, chats.length + 1
    every, half = range(chats.num_turns), chats.num_turns // 2
    truth = chats.begin()
    with setting.engine(2 * chats.total_tokens, max_model_len=max_model_len) as unbounded:
        hits = [chats.run(unbounded, truth, [turn]) for turn in every]
    with setting.engine(arena, max_model_len=max_model_len) as plain:
        without = chats.run(plain, chats.begin(), every)
    said = chats.begin()
    with setting.engine(arena, host_pool, max_model_len=max_model_len) as engine:
        with_host_pool = chats.run(engine, said, every)
    _compare(setting, truth, said)
    said = chats.begin()
    tier = {"type": "fs", "path": str(setting.folder / "chats"), "timeout_seconds": 10}
    with setting.engine(arena, arena, [tier], max_model_len=max_model_len) as engine:
        chats.run(engine, said, every[:half])
    with setting.engine(arena, arena, [tier], max_model_len=max_model_len) as engine:
        after_restart = chats.run(engine, said, every[half:])
    _compare(setting, truth, said)
    tell(
        "chats",
        tokens=chats.total_tokens,
        unbounded=hits,
        small_arena=without,
        host_pool=with_host_pool,
        restarted=after_restart,
    )
    what = f"chats of {chats.total_tokens:,} tokens, {TIMES_THE_ARENA} x the arena: hits / an unbounded cache's"
    return [
        Row(f"{what}, without a host pool", [without / sum(hits)]),
        Row(f"{what}, host pool", [with_host_pool / sum(hits)], BAR, False),
        Row(f"{what}, fs after a restart", [after_restart / sum(hits[half:])], BAR, False),
    ]


def _compare(setting: Setting, truth: Sequence[list[int]], said: Sequence[list[int]]) -> None:
    setting.num_compared += len(truth)
    setting.num_differing += sum(ours != theirs for ours, theirs in zip(truth, said, strict=True))
