"""How much sooner a prompt answers whose beginning is in the prefix cache.

    python -m benchmarks.prefix_cache [--model qwen3-0.6b] [--repeat 5] [--models FOLDER]
    python -m benchmarks.prefix_cache --model qwen3.5-0.8b --prompt-len 1760 --cached-len 1700 --goal 4

Each round draws a new beginning of 3,900 tokens and two ends of 100. The first prompt computes all of it, the second one finds
the beginning. Goal: its first token comes at least 10 times sooner (medians). At least 85 % of the beginning must be found.
With recurrent layers (the second command), a cached beginning ends at a snapshot of their states.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, print_table, verdict
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.setting_text import parse_bytes

GOAL, LEAST_SHARE = 10.0, 0.85


def first_token(engine: LLMEngine, name: str, token_ids: list[int]) -> tuple[float, RequestOutput]:
    """Seconds until the first token of a request that has the engine for itself."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": token_ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return time.perf_counter() - start, output
    raise AssertionError("the request ended without an output")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token with and without a cached beginning.")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--prompt-len", type=int, default=4000, help="[%(default)s]")
    parser.add_argument("--cached-len", type=int, default=3900, help="[%(default)s]")
    parser.add_argument("--goal", type=float, default=GOAL, help="the least ratio [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, help="rounds [%(default)s]")
    parser.add_argument("--kv-cache-memory-bytes", type=parse_bytes, default=parse_bytes("2G"), help="[2G]")
    parser.add_argument("--num-threads", type=int, help="compute threads [one a core]")
    args = parser.parse_args()
    if not 1 <= args.cached_len < args.prompt_len:
        parser.error("--cached-len must be from 1 to less than --prompt-len")
    allow_slow_steps()
    engine_args = EngineArgs(
        model=str(model_folder(args.model, args.models)),
        max_model_len=args.prompt_len + 1,
        max_num_seqs=4,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        skip_tokenizer_init=True,
        num_threads=args.num_threads,
    )
    engine = LLMEngine.from_args(engine_args)
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, 3900) for _ in range(count)]

    uncached: list[float] = []
    cached: list[float] = []
    try:
        first_token(engine, "warm-up", draw(args.prompt_len))
        for index in range(args.repeat):
            beginning = draw(args.cached_len)
            for times, name in ((uncached, "uncached"), (cached, "cached")):
                prompt = beginning + draw(args.prompt_len - args.cached_len)
                seconds, output = first_token(engine, f"{name}-{index}", prompt)
                hit = output.num_cached_tokens
                share = hit / args.cached_len
                assert (share == 0) if name == "uncached" else (LEAST_SHARE <= share <= 1), (name, hit)
                times.append(seconds)
                fields = {"prompt": name, "cached_tokens": hit, "share": round(share, 3), "seconds": round(seconds, 4)}
                emit(benchmark="prefix_cache", round=index, **fields)
    finally:
        engine.close()
    medians = [statistics.median(times) for times in (uncached, cached)]
    ratio = medians[0] / medians[1]
    emit(
        benchmark="prefix_cache", uncached_s=round(medians[0], 4), cached_s=round(medians[1], 4), ratio=round(ratio, 1)
    )
    print_table(
        ["first token", "uncached s", "cached s", "ratio", "goal"],
        [
            [
                "median",
                f"{medians[0]:.3f}",
                f"{medians[1]:.3f}",
                f"{ratio:.1f}",
                f">= {args.goal:g} {verdict(ratio >= args.goal)}",
            ]
        ],
    )


if __name__ == "__main__":
    main()
