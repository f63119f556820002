"""The timelines of docs/how-it-works.md: a few steps of real runs, as text.

    python -m benchmarks.how_it_works [--rounds 40]

One stage with the embedded model, 48 requests, at depth 1, at depth 2, and with a grammar on 16 of them; and two pipeline
stages of 20 ms with links of 10 ms (`fixed_stages.py`).
"""

from __future__ import annotations

import argparse
import random

from benchmarks.overlap.fixed_stages import decode_request, make_engine, rank_events
from benchmarks.overlap.pipeline_overlap import LAYOUTS, NUM_REQUESTS
from benchmarks.overlap.step_picture import Events, window
from benchmarks.overlap.step_text import text_steps
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams

BATCH, NUM_GRAMMARS = 48, 16
SHOWN_STEPS = 4
ITEMS = {"type": "array", "minItems": 40, "maxItems": 60, "items": {"type": "string", "minLength": 1, "maxLength": 30}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps before those that are shown")
    options = parser.parse_args()
    for title, depth, num_grammars in (
        ("one stage, depth 1", 1, 0),
        ("one stage, depth 2", 2, 0),
        (f"one stage, depth 2, {NUM_GRAMMARS} of {BATCH} rows under a grammar", 2, NUM_GRAMMARS),
    ):
        show(title, one_stage(depth, num_grammars, options.rounds))
    show("two stages of 20 ms, links of 10 ms, stagger 3, depth 4", two_stages(options.rounds))


def show(title: str, events: Events) -> None:
    print(f"\n{title}\n\n{text_steps(events, *window(events, SHOWN_STEPS))}", flush=True)


def one_stage(depth: int, num_grammars: int, num_steps: int) -> Events:
    engine = LLMEngine.from_args(
        EngineArgs(async_scheduling=depth == 2, max_model_len=512, kv_cache_memory_bytes=1 << 28)
    )
    rng = random.Random(0)
    grammar = StructuredOutputsParams(json=ITEMS)
    try:
        for index in range(BATCH):
            params = SamplingParams(
                temperature=1.0,
                seed=index,
                max_tokens=400,
                ignore_eos=index >= num_grammars,
                structured_outputs=grammar if index < num_grammars else None,
            )
            prompt = [rng.randrange(300, 1500) for _ in range(16)]
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for _ in range(num_steps):
            engine.step()
        return engine.timeline_events()
    finally:
        engine.close()


def two_stages(num_steps: int) -> Events:
    core, executor = make_engine(LAYOUTS["pp2"], NUM_REQUESTS)
    try:
        for index in range(NUM_REQUESTS):
            core.add_request(*decode_request(index, max_tokens=900))
        for _ in range(num_steps):
            core.step()
        return {"engine": core.timeline.events(), **rank_events(executor)}
    finally:
        core.close()


if __name__ == "__main__":
    main()
