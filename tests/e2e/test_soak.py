"""Many requests of random sizes through few slots: every block comes back, memory does not grow.

`make test` runs a share of the 10,000 requests that `make test-full` runs; `benchmarks.soak` takes a larger model.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.robustness.soak import MAX_GROWTH, Soak, draw_requests, growth_bytes
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
NUM_REQUESTS = 10_000 if FULL else 80


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=0)
    arguments = EngineArgs(
        model=str(folder),
        max_model_len=256,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 21,  # small: requests are preempted, cached blocks evicted
        skip_tokenizer_init=True,
        num_threads=1,
    )
    engine = LLMEngine.from_args(arguments)
    try:
        requests = draw_requests(0, NUM_REQUESTS, 128, 48)
        small = (([token % VOCAB_SIZE for token in prompt], *rest) for prompt, *rest in requests)
        soak = Soak(engine, small, num_waiting=64)  # type: ignore[arg-type]
        soak.run(sample_every=NUM_REQUESTS // (40 if FULL else 4))  # each sample collects all garbage of this process
        assert soak.num_done + soak.num_aborted == NUM_REQUESTS
        assert engine.core.scheduler.stats.num_preemptions > 0
        assert engine.core.take_stats().kv_cache_usage == 0.0
        engine.core.scheduler.check_integrity()
        if FULL:
            assert growth_bytes([resident for _, resident in soak.samples]) <= MAX_GROWTH
    finally:
        engine.close()
