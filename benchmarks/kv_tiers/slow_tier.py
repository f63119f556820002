"""A tier of a chosen speed: a request must not wait much longer than the faster of fetching and computing takes.

The time of fetching is the sum of the tier's sleeps (`num_waits` one after another) and of the first token from the host pool.
"""

from __future__ import annotations

import statistics

from benchmarks.kv_tiers.setting import BLOCK_SIZE, Row, Setting, drain, first_token, forget_arena, forget_near, tell
from benchmarks.kv_tiers.sleeping_tier import MODULE_PATH, SleepingTier
from inflight.kv_connector.rank_transfers import NUM_FETCH_THREADS
from inflight.scheduler.kv_fetches import FIRST_FETCH, LAST_FETCH

BAR = 1.2
# What the tier takes for a prompt / what computing takes. The last one answers nothing in time.
SLOWNESS = (0.1, 0.3, 0.6, 1.0, 2.0, 8.0, 1000.0)
TIMEOUT_SECONDS = 2.0


def num_waits(num_blocks: int) -> int:
    """How many reads one after another a prompt of so many blocks takes, when `NUM_FETCH_THREADS` run at once."""
    count, size = 0, FIRST_FETCH
    while num_blocks > 0:
        count += -(-min(size, num_blocks) // NUM_FETCH_THREADS)
        num_blocks, size = num_blocks - size, min(2 * size, LAST_FETCH)
    return count


def rows(setting: Setting) -> list[Row]:
    length = min(setting.prompt_len, 1024)
    tier = {"type": "custom", "module_path": MODULE_PATH, "timeout_seconds": TIMEOUT_SECONDS}
    prompts = [setting.draw(length) for _ in range(setting.rounds + 1)]
    tokens = 4 * length * len(prompts)
    found = []
    with (
        setting.engine(length + 16, max_model_len=length + 1) as plain,
        setting.engine(tokens, tokens, [tier], max_model_len=length + 1) as engine,
    ):
        truths, near = [], []
        for prompt in prompts:
            truths.append(first_token(engine, prompt)[1])
            drain(engine)
            forget_arena(engine)
            near.append(first_token(engine, prompt)[0])
            drain(engine)
        from_host_pool = statistics.median(near)
        for slowness in SLOWNESS:
            ratios = []
            for index, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
                forget_arena(plain)
                forget_near(engine)
                computed, _ = first_token(plain, prompt)
                waits = num_waits((length - 1) // BLOCK_SIZE)
                SleepingTier.seconds = min(slowness * computed / waits, 3 * TIMEOUT_SECONDS)
                seconds, output = first_token(engine, prompt)
                SleepingTier.seconds = 0.0
                drain(engine)
                setting.compare(truth, output)
                better = min(computed, slowness * computed + from_host_pool)
                tell(
                    "slow tier", slowness=slowness, round=index, computed_s=computed, better_s=better, seconds=seconds,
                    cached=output.num_cached_tokens,
                )  # fmt: skip
                if index:  # the engine has to see once how slow the tier is now
                    ratios.append(seconds / better)
            name = "does not answer" if slowness > 100 else f"takes {slowness:g} x computing"
            found.append(Row(f"first token, a tier that {name} / the better way", ratios, BAR))
    return found
