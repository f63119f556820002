"""What batches, blocks and stages bring: three relations, each measured with both sides in turns.

    python -m benchmarks.batching [pipeline] [batch] [padding] [--model qwen3-0.6b] [--models FOLDER] [--rounds 7]

pipeline: two stages of one thread each, as two processes, against one worker of one thread, in a decode of 64 requests (goal
1.5 times) and in prompts (1.7 times). batch: the decode of 32 requests against that of one. padding: requests of mixed lengths
in a ragged batch over KV blocks against the same requests padded to the longest, as a batch of equal lengths needs them; a
padded batch counts the same useful tokens.

Speeds are tokens per second. A decode is timed from when every request has drawn to when each has drawn its share, so that
prompts do not count. Depth 2 against depth 1: `benchmarks.planning_ahead`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, print_table, verdict
from inflight import SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.request_state import RequestOutputKind
from inflight.entrypoints.cli.workloads import Workload
from inflight.entrypoints.llm_engine import LLMEngine

PIPELINE_BATCH, PIPELINE_DECODE_GOAL, PIPELINE_PREFILL_GOAL = 64, 1.5, 1.7
PIPELINE_PROMPTS = Workload("prefill", 16, 512, 1)
PIPELINE_CHUNK_TOKENS = 256  # a step of both sides: 32 steps, of which the second stage misses the first
DECODE_TOKENS = 24  # timed, of each request
PADDED_BATCH, PADDED_PROMPT, PADDED_OUTPUT = 32, (16, 384), (8, 64)


def decode_speed(engine: LLMEngine, batch: int) -> float:
    """Tokens per second of `batch` requests that all decode."""
    params = SamplingParams(temperature=0.0, max_tokens=4 * DECODE_TOKENS, ignore_eos=True, detokenize=False)
    names = [str(index) for index in range(batch)]
    for name, prompt in zip(names, Workload("", batch, 16, 1).prompts(), strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params, kind=RequestOutputKind.DELTA)
    drawn = dict.fromkeys(names, 0)

    def step_until_all_have(num_tokens: int) -> None:
        while min(drawn.values()) < num_tokens:
            for output in engine.step():
                drawn[output.request_id] += len(output.outputs[0].token_ids)

    step_until_all_have(2)
    before, start = sum(drawn.values()), time.perf_counter()
    step_until_all_have(2 + DECODE_TOKENS)
    speed = (sum(drawn.values()) - before) / (time.perf_counter() - start)
    engine.abort_requests(names)
    while engine.has_unfinished_requests():
        engine.step()
    return speed


def run(engine: LLMEngine, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> float:
    """Seconds from the first request to the last token."""
    start = time.perf_counter()
    for index, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def prefill_speed(engine: LLMEngine, workload: Workload) -> float:
    """Prompt tokens per second."""
    return workload.num_counted_tokens / run(engine, workload.prompts(), [1] * workload.batch_size)


@contextmanager
def make_engine(
    options: argparse.Namespace, **engine_args: Any
) -> Iterator[LLMEngine]:  # Any: as `EngineArgs` takes them
    arguments = {
        "model": str(model_folder(options.model, options.models)),
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 1 << 30,
        "skip_tokenizer_init": True,
        **engine_args,
        **options.engine_args,
    }
    engine = LLMEngine.from_args(EngineArgs.from_kwargs(arguments))
    try:
        yield engine
    finally:
        engine.close()


def pipeline(options: argparse.Namespace) -> None:
    common = {"num_threads": 1, "max_num_batched_tokens": PIPELINE_CHUNK_TOKENS}
    with (
        make_engine(options, **common) as one,
        make_engine(options, **common, pipeline_parallel_size=2, distributed_executor_backend="mp") as two,
    ):
        rows = []
        for case, speed, goal in (
            (f"decode, batch {PIPELINE_BATCH}", partial(decode_speed, batch=PIPELINE_BATCH), PIPELINE_DECODE_GOAL),
            ("prefill", partial(prefill_speed, workload=PIPELINE_PROMPTS), PIPELINE_PREFILL_GOAL),
        ):
            row = compare_in_turns("pipeline", case, partial(speed, one), partial(speed, two), options.rounds)
            rows.append([*row, f">= {goal} {verdict(float(row[-1].split()[0]) >= goal)}"])
    print_table(["tokens/s", "1 worker", "2 stages", "ratio", "goal"], rows)


def batch(options: argparse.Namespace) -> None:
    with make_engine(options) as engine:
        sides = [partial(decode_speed, engine, size) for size in (1, 32)]
        row = compare_in_turns("batch", "decode", sides[0], sides[1], options.rounds)
    print_table(["tokens/s", "batch 1", "batch 32", "ratio"], [row])


def padding(options: argparse.Namespace) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1500) for _ in range(rng.randint(*PADDED_PROMPT))] for _ in range(PADDED_BATCH)]
    output_lens = [rng.randint(*PADDED_OUTPUT) for _ in range(PADDED_BATCH)]
    longest, last = max(map(len, prompts)), max(output_lens)
    padded = [prompt + prompt[:1] * (longest - len(prompt)) for prompt in prompts]
    useful = sum(output_lens)
    with make_engine(options, max_num_batched_tokens=2048) as engine:

        def speed(prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> float:
            return useful / run(engine, prompts, output_lens)

        ragged = partial(speed, prompts, output_lens)
        rows = [
            compare_in_turns("padding", case, side, ragged, options.rounds)
            for case, side in (
                ("prompts padded", partial(speed, padded, output_lens)),
                ("prompts and outputs padded", partial(speed, padded, [last] * PADDED_BATCH)),
            )
        ]
    print_table(["output tokens/s", "padded", "ragged", "ratio"], rows)


RELATIONS: dict[str, Callable[[argparse.Namespace], None]] = {"pipeline": pipeline, "batch": batch, "padding": padding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("relations", nargs="*", help=f"{', '.join(RELATIONS)} [all]")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=7, help="that count; one more is a warm-up [%(default)s]")
    parser.add_argument("--engine-args", type=json.loads, default={}, help='JSON, as {"quantization": "int8"}')
    options = parser.parse_args()
    for name in options.relations:
        if name not in RELATIONS:
            parser.error(f"{name!r} is not one of {', '.join(RELATIONS)}")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    allow_slow_steps()
    for name in options.relations or RELATIONS:
        RELATIONS[name](options)


if __name__ == "__main__":
    main()
