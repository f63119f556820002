"""One engine's figures: start-up, decode steps, prefill, a large mixed batch, and where the device's time goes.

    python -m benchmarks.gpu.engine_figures --model qwen3-0.6b [--engine-args JSON] [--figures decode idle ...]

Weights are drawn on the device, requests are token ids, one rank runs in this process. A decode step's time is the median of
those from one step's results to the next step's, in the middle of the outputs: the host's part is in it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.arguments import device_parser, measured
from benchmarks.gpu.driving import Driver, steady
from benchmarks.gpu.floors import Floor
from benchmarks.gpu.sizes import CONFIGS, Sizes, random_lengths, random_prompts, sizes_of
from benchmarks.gpu.trace import idleness, kernel_shares
from benchmarks.shared.report import emit
from inflight import LLM

NUM_KERNELS = 12  # of a step, that are named


class EngineFigures:
    """The figures by name: each method of `FIGURES` emits its own."""

    FIGURES = ("decode", "prefill", "throughput", "device_time", "graphs", "long")

    def __init__(self, llm: LLM, device: str, sizes: Sizes) -> None:
        self._llm, self._device, self._sizes = llm, device, sizes
        self._floor = Floor.of(llm.llm_engine.executor.config)
        self._driver = Driver(llm, device)

    def decode(self) -> None:
        for batch in self._sizes.batches:
            measured(f"decode/{batch}", partial(self._decode, batch))

    def prefill(self) -> None:
        for num_tokens in self._sizes.prefill_lens:
            measured(f"prefill/{num_tokens}", partial(self._prefill, num_tokens))

    def device_time(self) -> None:
        for batch in self._sizes.traced_batches:
            measured(f"idle/{batch}", partial(self._device_time, batch))

    def throughput(self) -> None:
        """Lengths of prompts and outputs drawn at random; the second of two runs, for it finds everything compiled."""
        count, interval = self._sizes.num_sequences, self._sizes.sequence_lens
        prompts = random_prompts(random_lengths(count, interval, seed=1))
        output_lens = random_lengths(count, interval, seed=2)
        self._driver.run(prompts, [4] * count)
        seconds = sum(self._driver.run(prompts, output_lens))
        num_prompt_tokens, num_output_tokens = sum(map(len, prompts)), sum(output_lens)
        emit(
            figure="throughput", sequences=count, prompt_tokens=num_prompt_tokens, output_tokens=num_output_tokens,
            seconds=round(seconds, 3), output_tokens_per_second=round(num_output_tokens / seconds, 1),
            tokens_per_second=round((num_prompt_tokens + num_output_tokens) / seconds, 1),
        )  # fmt: skip

    def long(self) -> None:
        """Steps over long contexts, alone and beside a prompt: a step of both should take little more than the two would."""
        for batch, length in self._sizes.long_contexts:
            measured(f"long/{batch}x{length}", partial(self._long, batch, length))

    def graphs(self) -> None:
        """What the ranks captured as they started: how many graphs, in how many seconds, in how many bytes."""
        if self._device == "cuda":
            emit(figure="graphs", ranks=self._llm.collective_rpc("graph_report"))

    def _decode(self, batch: int) -> None:
        prompt_len, output_len = self._sizes.prompt_len, self._sizes.output_len
        prompts = random_prompts([prompt_len] * batch)
        self._driver.run(prompts, [output_len // 4] * batch)
        periods = steady(self._driver.run(prompts, [output_len] * batch))
        milliseconds = 1e3 * statistics.median(periods)
        emit(
            figure=f"decode/{batch}", ms_per_step=round(milliseconds, 4),
            mean_ms_per_step=round(1e3 * statistics.fmean(periods), 4), steps=len(periods),
            tokens_per_second=round(batch * 1e3 / milliseconds, 1),
            floor_bytes=self._floor.decode_bytes(batch, prompt_len + output_len / 2),
        )  # fmt: skip

    def _long(self, batch: int, length: int) -> None:
        prompts, beside = random_prompts([length] * batch), random_prompts([self._sizes.beside_len], seed=5)[0]
        self._driver.run([beside], [1])  # compiles what it needs
        alone, longest = self._driver.times_over_long_contexts(prompts, beside, self._sizes.traced_steps)
        emit(
            figure=f"long/{batch}x{length}", ms_per_step=round(1e3 * statistics.median(alone), 4),
            ms_beside_a_prompt=round(1e3 * longest, 4), prompt_tokens=self._sizes.beside_len,
            floor_bytes=self._floor.decode_bytes(batch, length),
        )  # fmt: skip

    def _prefill(self, num_tokens: int) -> None:
        """One prompt alone, its first token included; and several waiting in a row, a step each."""
        prompts = random_prompts([num_tokens] * self._sizes.num_prefills, seed=num_tokens)
        self._driver.run(prompts[:1], [1])
        alone = statistics.median(sum(self._driver.run([prompt], [1])) for prompt in prompts)
        row = sum(self._driver.run(prompts, [1] * len(prompts))) / len(prompts)
        emit(
            figure=f"prefill/{num_tokens}", seconds_alone=round(alone, 5), seconds=round(row, 5),
            tokens_per_second=round(num_tokens / row, 1), operations=self._floor.prefill_operations(num_tokens),
        )  # fmt: skip

    def _device_time(self, batch: int) -> None:
        prompts, num_steps = random_prompts([self._sizes.prompt_len] * batch), self._sizes.traced_steps
        self._driver.trace_decoding(prompts, 2)  # the profiler's own first time
        trace = self._driver.trace_decoding(prompts, num_steps)
        found = {name: _rounded(value) for name, value in asdict(idleness(trace.kernels, num_steps)).items()}
        emit(figure=f"idle/{batch}", steps=num_steps, host_waits=trace.host_calls, **found)
        shares = kernel_shares(trace.kernels, num_steps)
        emit(
            figure=f"kernels/{batch}", kernels_per_step=round(len(trace.kernels) / num_steps, 1),
            busy_us_per_step=round(sum(share.us_per_step for share in shares), 1),
            kernels=[
                [share.name, round(share.count_per_step, 1), round(share.us_per_step, 1), round(share.share, 3)]
                for share in shares[:NUM_KERNELS]
            ],
        )  # fmt: skip


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def start_engine(model: str, device: str, sizes: Sizes, engine_args: dict[str, Any]) -> LLM:  # Any: LLM's arguments
    """Emits how long it took to start, and to the first token."""
    small_cache = {"kv_cache_memory_bytes": 1 << 26, "num_threads": 1} if device == "cpu" else {}
    start = time.perf_counter()
    llm = LLM(
        str(CONFIGS / model),
        **{
            "device": device,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": max(*sizes.batches, sizes.num_sequences),
            "max_num_batched_tokens": min(8192, max(sizes.prefill_lens)),
            "distributed_executor_backend": "uni",
            **small_cache,
            **engine_args,
        },
    )
    ready = time.perf_counter() - start
    Driver(llm, device).run(random_prompts([sizes.prompt_len]), [1])
    first_token = time.perf_counter() - start
    memory = {}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = {"device_memory_gib": round((total - free) / 2**30, 2)}
    emit(
        figure="start_up", seconds=round(ready, 3), first_token_seconds=round(first_token, 3),
        kv_cache_tokens=llm.llm_engine.core.kv_cache_config.num_tokens, **memory,
    )  # fmt: skip
    return llm


def main(arguments: Sequence[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--model", choices=sorted(path.name for path in CONFIGS.iterdir()), required=True)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON: further arguments of the engine")
    parser.add_argument("--batches", nargs="+", type=int, help="of decode steps")
    parser.add_argument("--figures", nargs="+", choices=EngineFigures.FIGURES, default=EngineFigures.FIGURES)
    args = parser.parse_args(arguments)
    sizes = sizes_of(args.device, quick=args.quick)
    if args.batches:
        sizes = replace(sizes, batches=tuple(args.batches))
    with start_engine(args.model, args.device, sizes, args.engine_args) as llm:
        figures = EngineFigures(llm, args.device, sizes)
        for name in args.figures:
            measured(name, getattr(figures, name))


if __name__ == "__main__":
    main()
