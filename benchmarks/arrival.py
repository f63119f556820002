"""How long the arrival of a request with a long prompt holds the engine's loop, and so all streams.

    python -m benchmarks.arrival [--tokens 120000] [--times 20]

The loop decodes no message (a thread does), but it makes the state of each of the n sequences. Goal: 10 ms, for any n.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from benchmarks.mock_executor import NAME
from benchmarks.models import add_model_arguments, model_folder
from benchmarks.report import MIB, emit, percentile, print_table, verdict
from inflight.config.engine_args import EngineArgs
from inflight.engine.front_end import make_input_processor, resolve_config
from inflight.engine.input_processor import InputProcessor
from inflight.engine.llm_engine import LLMEngine
from inflight.interface.codec import encode
from inflight.interface.serving import AddRequest
from inflight.sampling_params import SamplingParams

GOAL_MS = 10.0


def measure(
    engine: LLMEngine, processor: InputProcessor, num_sequences: int, prompt: list[int], count: int
) -> tuple[list[float], int]:
    """Returns the milliseconds of each arrival, and the bytes of its message."""
    params, core = SamplingParams(n=num_sequences, max_tokens=8, temperature=1.0, seed=0), engine.core
    times, num_bytes = [], 0
    for i in range(count):
        request = processor.process(f"{num_sequences}-{i}", {"prompt_token_ids": prompt}, params)
        message = AddRequest.of(request.children)
        num_bytes = sum(len(memoryview(buffer).cast("B")) for buffer in encode(message).buffers())
        start = time.perf_counter()
        for child in message.sequences():
            core.add_request(child)
        times.append((time.perf_counter() - start) * 1e3)
        core.abort_requests({child.request_id for child in message.children})
    return times, num_bytes


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
            p50, most = round(percentile(times, 0.5), 2), round(max(times), 2)
            emit(benchmark="arrival", n=num_sequences, tokens=args.tokens, p50_ms=p50, max_ms=most, num_bytes=num_bytes)
            rows.append([num_sequences, p50, most, f"{num_bytes / 2**20:.2f}", f"< {GOAL_MS} {verdict(p50 < GOAL_MS)}"])
    finally:
        engine.close()
    print_table(["n", "p50 ms", "longest ms", "message MiB", "goal (p50)"], rows)


if __name__ == "__main__":
    main()
