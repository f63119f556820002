"""Planning one step ahead on one stage against one step at a time: two engines of one model, in turns.

    python -m benchmarks.planning_ahead [--model qwen3-0.6b] [--batch 1 8 64] [--rounds 7] [--models FOLDER]

Requests of 32 prompt tokens decode at batch 1, 8 and 64. Figures are medians of tokens per second; tokens must be equal.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import print_table
from inflight import LLM, SamplingParams

PROMPT_TOKENS = 32
OUTPUT_TOKENS = {1: 32, 8: 32, 64: 16}  # by batch


def measure(
    engine: LLM, prompts: list[Sequence[int]], num_tokens: int, drawn: set[tuple[tuple[int, ...], ...]]
) -> float:
    """Tokens per second; what is drawn is added to `drawn`."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    speed = len(prompts) * num_tokens / (time.perf_counter() - start)
    drawn.add(tuple(tuple(output.outputs[0].token_ids) for output in outputs))
    assert len(drawn) == 1, "planning ahead changed a token"
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="*", choices=OUTPUT_TOKENS, default=list(OUTPUT_TOKENS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    engines = [
        LLM(
            str(model_folder(options.model, options.models)),
            async_scheduling=depth == 2,
            enable_prefix_caching=False,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 30,
            skip_tokenizer_init=True,
        )
        for depth in (1, 2)
    ]
    rng = random.Random(0)
    rows = []
    for batch in options.batch:
        prompts: list[Sequence[int]] = [[rng.randrange(3, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        drawn: set[tuple[tuple[int, ...], ...]] = set()
        sides = [partial(measure, engine, prompts, OUTPUT_TOKENS[batch], drawn) for engine in engines]
        rows.append(compare_in_turns("planning_ahead", str(batch), sides[0], sides[1], options.rounds))
    for engine in engines:
        engine.close()
    print_table(["batch", "depth 1, tokens/s", "depth 2", "ratio"], rows)


if __name__ == "__main__":
    main()
