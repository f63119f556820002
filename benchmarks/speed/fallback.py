"""The fallback to transformers beside Inflight's own code, and beside transformers' continuous batching.

    python -m benchmarks.fallback [native] [generate_batch] [--model qwen3-0.6b] [--models FOLDER] [--rounds 5]

native: one model, computed by transformers' layers on Inflight's engine (`model_impl="transformers"`), against Inflight's own
layers, in turns. Goals: 0.75 times the speed in the decode of one request, 0.9 times in the decode of 32 and in prompts.

generate_batch: 16 requests of 256 prompt tokens and 64 output tokens, by the fallback, against the method `generate_batch` of
transformers, which batches requests over a paged cache, too. Goal: 3 times the speed.

Each engine of "native" has a process for its rank. With two pools of compute threads in one process, idle threads would sleep
at once. This costs the fallback more, because its steps have more parallel regions.

Speeds are tokens per second. Weights are bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, print_table, verdict
from benchmarks.speed.batching import decode_speed, make_engine, prefill_speed, run
from inflight.entrypoints.cli.workloads import Workload

GOALS = {"decode, batch 1": 0.75, "decode, batch 32": 0.9, "prefill": 0.9}
GENERATE_BATCH_GOAL = 3.0
PROMPTS = Workload("prefill", 8, 512, 1)
BATCH = Workload("batch", 16, 256, 64)


def native(options: argparse.Namespace) -> None:
    with (
        make_engine(options, model_impl="inflight", distributed_executor_backend="mp") as own,
        make_engine(options, model_impl="transformers", distributed_executor_backend="mp") as fallback,
    ):
        speeds = [
            partial(decode_speed, batch=1),
            partial(decode_speed, batch=32),
            partial(prefill_speed, workload=PROMPTS),
        ]
        rows = []
        for (case, goal), speed in zip(GOALS.items(), speeds, strict=True):
            row = compare_in_turns("native", case, partial(speed, own), partial(speed, fallback), options.rounds)
            rows.append([*row, f">= {goal} {verdict(float(row[-1].split()[0]) >= goal)}"])
    print_table(["tokens/s", "own", "fallback", "ratio", "goal"], rows)


def generate_batch(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    folder = model_folder(options.model, options.models)
    model: Any = AutoModelForCausalLM.from_pretrained(  # Any: its methods have no types
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    config = GenerationConfig(max_new_tokens=BATCH.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # a cache of the size that is needed, and one start for all rounds: otherwise its preparation takes most of the time
    batching = ContinuousBatchingConfig(
        num_blocks=4 * BATCH.batch_size, max_batch_tokens=2048, allow_block_sharing=False
    )
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)

    def by_transformers() -> float:
        def call() -> None:
            outputs = model.generate_batch(
                inputs=BATCH.prompts(),
                generation_config=config,
                continuous_batching_config=batching,
                persistent_manager=True,
                progress_bar=False,
            )
            counts = {len(output.generated_tokens) for output in outputs.values()}
            assert counts == {BATCH.output_len} and len(outputs) == BATCH.batch_size, counts

        return BATCH.num_counted_tokens / seconds(call)

    with make_engine(options, model_impl="transformers") as engine:

        def by_fallback() -> float:
            return BATCH.num_counted_tokens / run(engine, BATCH.prompts(), [BATCH.output_len] * BATCH.batch_size)

        row = compare_in_turns("generate_batch", "16 x (256, 64)", by_transformers, by_fallback, options.rounds)
    goal = f">= {GENERATE_BATCH_GOAL} {verdict(float(row[-1].split()[0]) >= GENERATE_BATCH_GOAL)}"
    print_table(["tokens/s", "generate_batch", "fallback", "ratio", "goal"], [[*row, goal]])


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parts = {"native": native, "generate_batch": generate_batch}
    parser = argparse.ArgumentParser(description="The fallback to transformers, beside two others.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} [both]")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--num-threads", type=int, help="compute threads [one a core]")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(parts)):
        parser.error(f"{unknown[0]!r} is none of {', '.join(parts)}")
    allow_slow_steps()
    args.engine_args = {} if args.num_threads is None else {"num_threads": args.num_threads}
    for name, part in parts.items():
        if not args.parts or name in args.parts:
            part(args)


if __name__ == "__main__":
    main()
