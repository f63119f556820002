"""Many requests of random sizes through few slots: memory must not grow, and every block must become free again.

    python -m benchmarks.soak [--requests 10000] [--slots 64] [--models FOLDER]
    python -m benchmarks.fast_clock 64 benchmarks.soak --requests 40000 --engine-args '{"kv_offloading_size": 0.02}'

The second command takes some minutes, in which hours pass on the engine's clock.

Sizes, sampling parameters and aborts are drawn from a seed; the KV cache is small, so that requests are preempted and cached
blocks evicted. Goals: resident anonymous memory in the last quarter is at most 8 MiB and 1 % above that in the second one (the
first is warm-up), and the processor time of an output token at most 2 % above; all requests end, and then every block is free;
`check_integrity` holds all the time.

Warm-up takes some hundred requests: oneDNN keeps a compiled kernel for each number of rows that it has met, about sixty.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import MIB, allow_slow_steps, emit, memory_bytes, print_table, verdict
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.sampling_params import SamplingParams
from inflight.setting_text import parse_bytes

MAX_GROWTH = 8 * MIB
MAX_GROWTH_SHARE = 0.01
MAX_SLOWER = 1.02
ABORT_SHARE = 0.03
SHARED_BEGINNINGS = 8

Request = tuple[list[int], SamplingParams, int | None]  # prompt, parameters, steps until it is aborted


def draw_requests(seed: int, count: int, max_prompt_len: int, max_tokens: int) -> Iterator[Request]:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 3900) for _ in range(rng.randrange(16, 64))] for _ in range(SHARED_BEGINNINGS)]
    for _ in range(count):
        prompt = list(rng.choice(beginnings)) if rng.random() < 0.3 else []
        prompt += [rng.randrange(3, 3900) for _ in range(rng.randrange(1, max_prompt_len))]
        temperature = rng.choice([0.0, 0.7, 1.0])
        params = SamplingParams(
            temperature=temperature,
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 50]),
            n=1 if temperature == 0.0 else rng.choice([1, 1, 1, 2]),
            logprobs=rng.choice([None, None, None, 3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            max_tokens=rng.randrange(1, max_tokens + 1),
            seed=rng.randrange(2**31),
        )
        yield prompt, params, rng.randrange(1, 20) if rng.random() < ABORT_SHARE else None


class Soak:
    """Drives the engine and samples its memory."""

    def __init__(self, engine: LLMEngine, requests: Iterator[Request], num_waiting: int) -> None:
        self.engine = engine
        self.num_done = 0
        self.num_aborted = 0
        self.num_tokens = 0
        self.samples: list[tuple[int, int]] = []  # (requests done, resident bytes)
        self.token_seconds: list[float] = []  # processor time of an output token, between two samples
        self._sampled = (0, time.process_time())  # output tokens, processor time
        self._requests = enumerate(requests)
        self._num_waiting = num_waiting
        self._aborts: dict[str, int] = {}  # request id -> steps left

    def run(self, sample_every: int) -> None:
        engine = self.engine
        while True:
            while engine.core.scheduler.num_waiting < self._num_waiting and (drawn := next(self._requests, None)):
                index, (prompt, params, abort_after) = drawn
                engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
                if abort_after is not None:
                    self._aborts[str(index)] = abort_after
            if not engine.has_unfinished_requests():
                return
            before = self.num_done + self.num_aborted
            for output in engine.step():
                if output.finished:
                    self.num_done += 1
                    self.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    self._aborts.pop(output.request_id, None)
            self._abort_due()
            after = self.num_done + self.num_aborted
            if after // sample_every > before // sample_every:
                self._sample(after)

    def _abort_due(self) -> None:
        for request_id in list(self._aborts):
            self._aborts[request_id] -= 1
            if self._aborts[request_id] == 0:
                del self._aborts[request_id]
                self.engine.abort_requests([request_id])
                self.num_aborted += 1

    def _sample(self, num_ended: int) -> None:
        self.engine.core.scheduler.check_integrity()
        gc.collect()
        resident = memory_bytes("RssAnon")  # pages of mapped files come and go as the kernel pleases
        self.samples.append((num_ended, resident))
        (num_tokens, seconds), self._sampled = self._sampled, (self.num_tokens, time.process_time())
        self.token_seconds.append((self._sampled[1] - seconds) / max(1, self.num_tokens - num_tokens))
        stats = self.engine.core.scheduler.stats
        emit(
            benchmark="soak", ended=num_ended, anonymous_mib=round(resident / MIB, 1),
            rss_mib=round(memory_bytes("VmRSS") / MIB, 1), preemptions=stats.num_preemptions,
            token_us=round(self.token_seconds[-1] * 1e6, 1),
            python_blocks=sys.getallocatedblocks(),  # grows with a leak of Python objects, not with one of torch's
        )  # fmt: skip


def growth_bytes(samples: Sequence[int]) -> int:
    """Median of the last quarter minus that of the second one. The first quarter is warm-up."""
    second, last = quarters(samples)
    return int(last - second)


def quarters(samples: Sequence[float]) -> tuple[float, float]:
    """The medians of the second quarter and of the last one."""
    quarter = max(1, len(samples) // 4)
    return statistics.median(samples[quarter : 2 * quarter] or samples[:1]), statistics.median(samples[-quarter:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests of random sizes for a long time.")
    add_model_arguments(parser, "llama-tiny")
    parser.add_argument("--requests", type=int, default=10_000, help="[%(default)s]")
    parser.add_argument("--slots", type=int, default=64, help="requests at once [%(default)s]")
    parser.add_argument("--max-prompt-len", type=int, default=128, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=48, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=40, help="how often memory is measured [%(default)s]")
    parser.add_argument("--num-threads", type=int, help="compute threads [one a core]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=parse_bytes, default=parse_bytes("8M"), help="small, to preempt [8M]"
    )
    parser.add_argument(
        "--default-kv-cache",
        action="store_true",
        help="let the engine choose the size of the KV cache, to measure how much memory it takes",
    )
    parser.add_argument("--engine-args", default="{}", help='JSON: further arguments of the engine, as {"seed": 1}')
    args = parser.parse_args()
    allow_slow_steps()
    engine_args = EngineArgs(
        model=str(model_folder(args.model, args.models)),
        max_model_len=args.max_prompt_len + args.max_tokens + 64,
        max_num_seqs=args.slots,
        kv_cache_memory_bytes=None if args.default_kv_cache else args.kv_cache_memory_bytes,
        skip_tokenizer_init=True,
        num_threads=args.num_threads,
        **json.loads(args.engine_args),
    )
    engine = LLMEngine.from_args(engine_args)
    start = time.perf_counter()  # of the fast clock, if there is one
    requests = draw_requests(args.seed, args.requests, args.max_prompt_len, args.max_tokens)
    soak = Soak(engine, requests, num_waiting=args.slots)
    try:
        soak.run(max(1, args.requests // args.samples))
        engine.core.scheduler.check_integrity()
        usage = engine.core.take_stats().kv_cache_usage
    finally:
        engine.close()
    seconds = time.perf_counter() - start
    ended = soak.num_done + soak.num_aborted
    assert ended == args.requests, f"{args.requests - ended} requests never ended"
    growth = growth_bytes(resident := [resident for _, resident in soak.samples])
    share = growth / quarters(resident)[0]
    second, last = quarters(soak.token_seconds)
    emit(
        benchmark="soak", requests=soak.num_done, aborted=soak.num_aborted, output_tokens=soak.num_tokens,
        seconds=round(seconds, 1), growth_mib=round(growth / MIB, 2), kv_cache_usage_after=usage,
    )  # fmt: skip
    print_table(
        ["what", "value", "goal"],
        [
            [
                "anonymous memory, last quarter - second",
                f"{growth / MIB:+.1f} MiB, {share:+.2%}",
                verdict(growth <= MAX_GROWTH and share <= MAX_GROWTH_SHARE),
            ],
            [
                "processor time of a token, last quarter / second",
                f"{last / second:.3f} of {second * 1e6:.0f} us",
                verdict(last / second <= MAX_SLOWER),
            ],
            ["share of KV blocks in use at the end", usage, verdict(usage == 0)],
            ["requests ended", ended, verdict(ended == args.requests)],
        ],
    )


if __name__ == "__main__":
    main()
