"""How long the arrival of a request with a long prompt holds the engine's loop, and so all streams.

    python -m benchmarks.arrival [--tokens 120000] [--times 20]

The loop decodes no message (a thread does), but it makes the state of each of the n sequences. Goal: 10 ms, for any n. Then the
sequences run to their ends, and `plan` and `commit` are the longest times that the loop planned and committed one step.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from benchmarks.shared.mock_executor import NAME
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import MIB, emit, percentile, print_table, verdict
from inflight.config.engine_args import EngineArgs
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.interface.codec import encode
from inflight.interface.serving import AddRequest
from inflight.sampling_params import SamplingParams

GOAL_MS = 10.0


def measure(
    engine: LLMEngine, processor: InputProcessor, num_sequences: int, prompt: list[int], count: int
) -> tuple[list[float], int]:
    """Returns the milliseconds of processor time of each arrival, and the bytes of its message. The last one is not aborted."""
    params, core = SamplingParams(n=num_sequences, max_tokens=40, temperature=1.0, seed=0, ignore_eos=True), engine.core
    times, num_bytes = [], 0
    for i in range(count):
        request = processor.process(f"{num_sequences}-{i}", {"prompt_token_ids": prompt}, params)
        message = AddRequest(prompt_token_ids=request.prompt_array, sequences=request.sequences)
        num_bytes = sum(len(memoryview(buffer).cast("B")) for buffer in encode(message).buffers())
        start = time.thread_time()
        for sequence in message.sequences:
            core.add_request(sequence, message.prompt_token_ids)
        times.append((time.thread_time() - start) * 1e3)
        if i + 1 < count:
            core.abort_requests({sequence.request_id for sequence in message.sequences})
    return times, num_bytes


def longest_steps(core: EngineCore) -> tuple[float, float]:
    """Runs all requests to their ends. Returns the longest milliseconds of a plan and of a commit."""
    start = time.perf_counter_ns()
    while core.has_unfinished_requests():
        core.step()
    events = [event for event in core.timeline.events() if event.start_ns >= start]
    plan, commit = (max(each.microseconds for each in events if each.phase == phase) for phase in ("plan", "commit"))
    return plan / 1e3, commit / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="The arrival of a long prompt.")
    add_model_arguments(parser, "llama-tiny")
    parser.add_argument("--tokens", type=int, default=120_000, help="tokens of the prompt [%(default)s]")
    parser.add_argument("--times", type=int, default=20, help="arrivals for each n [%(default)s]")
    args = parser.parse_args()
    length = args.tokens + 1000
    engine_args = EngineArgs(
        model=str(model_folder(args.model, args.models)),
        hf_overrides={"max_position_embeddings": length},
        max_model_len=length,
        kv_cache_memory_bytes=4096 * MIB,
        skip_tokenizer_init=True,
        distributed_executor_backend=NAME,
    )
    engine = LLMEngine.from_args(engine_args)
    processor = make_input_processor(engine_args, resolve_config(engine_args))
    gc.collect()
    gc.freeze()
    gc.disable()  # as the engine core's process does, which collects between steps
    prompt = np.random.default_rng(0).integers(3, 3900, args.tokens).tolist()
    rows: list[list[object]] = []
    try:
        for num_sequences in (1, 8, 128):
            times, num_bytes = measure(engine, processor, num_sequences, prompt, args.times)
            plan, commit = (round(each, 2) for each in longest_steps(engine.core))
            p50, most = round(percentile(times, 0.5), 2), round(max(times), 2)
            figures = {"p50_ms": p50, "max_ms": most, "plan_ms": plan, "commit_ms": commit, "num_bytes": num_bytes}
            emit(benchmark="arrival", n=num_sequences, tokens=args.tokens, **figures)
            size, goal = f"{num_bytes / 2**20:.2f}", f"< {GOAL_MS} {verdict(p50 < GOAL_MS)}"
            rows.append([num_sequences, p50, most, plan, commit, size, goal])
    finally:
        engine.close()
    print_table(["n", "p50 ms", "longest ms", "plan ms", "commit ms", "message MiB", "goal (p50)"], rows)


if __name__ == "__main__":
    main()
