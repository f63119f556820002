"""Planning one step ahead on one stage against one step at a time: two engines of one model, in turns.

    python -m benchmarks.planning_ahead [--model qwen3-0.6b] [--batch 1 8 64] [--rounds 7] [--models FOLDER]

Requests of 32 prompt tokens decode at batch 1, 8 and 64. Figures are medians of tokens per second; tokens must be equal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.models import add_model_arguments, model_folder
from benchmarks.report import emit, print_table
from inflight import LLM, SamplingParams

PROMPT_TOKENS = 32
OUTPUT_TOKENS = {1: 32, 8: 32, 64: 16}  # by batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="*", choices=OUTPUT_TOKENS, default=list(OUTPUT_TOKENS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    engines = {
        depth: LLM(
            str(model_folder(options.model, options.models)),
            async_scheduling=depth == 2,
            enable_prefix_caching=False,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 30,
            skip_tokenizer_init=True,
        )
        for depth in (1, 2)
    }
    rng = random.Random(0)
    rows = []
    for batch in options.batch:
        num_tokens = OUTPUT_TOKENS[batch]
        prompts = [[rng.randrange(3, 1500) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        speeds: dict[int, list[float]] = {1: [], 2: []}
        for index in range(options.rounds + 1):  # the first is a warm-up
            tokens = []
            for depth in (1, 2) if index % 2 else (2, 1):
                start = time.perf_counter()
                outputs = engines[depth].generate(prompts, params, use_tqdm=False)
                if index:
                    speeds[depth].append(batch * num_tokens / (time.perf_counter() - start))
                tokens.append([output.outputs[0].token_ids for output in outputs])
            assert tokens[0] == tokens[1], "planning ahead changed a token"
        one, two = (statistics.median(speeds[depth]) for depth in (1, 2))
        emit(benchmark="planning_ahead", batch=batch, depth_1=round(one, 1), depth_2=round(two, 1))
        rows.append([str(batch), f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}"])
    for engine in engines.values():
        engine.close()
    print_table(["batch", "depth 1, tokens/s", "depth 2", "ratio"], rows)


if __name__ == "__main__":
    main()
