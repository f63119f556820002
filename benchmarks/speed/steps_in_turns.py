"""Single steps of this checkout and of another one, in turns: which computes faster, on a machine whose speed changes.

    python -m benchmarks.steps_in_turns --before CHECKOUT [--model qwen3-0.6b] [--formats bf16,int8] [--steps 40] [--prompts 12]

Two processes hold an engine each, and one computes a step while the other one waits. So both are measured within a second,
where `benchmarks.compare --before` measures them within half a minute: on virtual machines the speed may change by a tenth in
that time. Steps are not planned ahead here, so nothing runs after a step has returned. Ratios above 1: this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32)
DECODE_PROMPT_LEN, PREFILL_LEN = 16, 512
SETTLE_SECONDS = 0.03  # until the threads of the other process sleep


class SteppingEngine:
    """An engine in a process of its own, of the checkout in the folder `root`."""

    def __init__(self, root: Path, model: Path, weight_format: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", str(model), weight_format],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "INFLIGHT_LOG_LEVEL": "WARNING"},
        )
        self._answer()

    def ask(self, *request: object) -> float:
        """Returns the seconds that it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return float(line)


def serve(model: str, weight_format: str) -> None:
    from inflight import LLM, SamplingParams

    quantization = (
        {} if weight_format == "bf16" else {"quantization": weight_format, "head_quantization": weight_format}
    )
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": max(BATCHES),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
        "async_scheduling": False,
        "distributed_executor_backend": "uni",
        **quantization,
    }
    engine: Any = LLM(model, **arguments).llm_engine
    print(0.0, flush=True)
    for number, line in enumerate(sys.stdin):
        action, *numbers = json.loads(line)
        start = time.perf_counter()
        if action == "add":
            count, length, max_tokens = numbers
            for i in range(count):
                prompt = [3 + (7 * i + j) % 1000 for j in range(length)]
                engine.add_request(
                    f"{number}-{i}", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
                )
        elif action == "step":
            engine.step()
        while action == "finish" and engine.has_unfinished_requests():
            engine.step()
        print(time.perf_counter() - start, flush=True)


def ratios(now: SteppingEngine, before: SteppingEngine, count: int, prepare: tuple[object, ...] = ()) -> list[float]:
    """The time of a step of `before` / that of `now`, `count` times, each one first in turns. `prepare`: what to ask for before
    each step; then all that is left is computed after it."""
    found = []
    for i in range(count):
        seconds = {}
        for engine in (now, before) if i % 2 else (before, now):
            if prepare:
                engine.ask(*prepare)
            time.sleep(SETTLE_SECONDS)
            seconds[engine] = engine.ask("step")
            if prepare:
                engine.ask("finish")
        found.append(seconds[before] / seconds[now])
    return found


def main() -> None:
    from benchmarks.shared.models import add_model_arguments, model_folder
    from benchmarks.shared.report import emit, print_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="with its kernels built")
    parser.add_argument("--formats", default="bf16,int8", help="of the weights [%(default)s]")
    parser.add_argument("--steps", type=int, default=40, help="of each batch [%(default)s]")
    parser.add_argument("--prompts", type=int, default=12, help=f"of {PREFILL_LEN} tokens [%(default)s]")
    args = parser.parse_args()
    model, rows = model_folder(args.model, args.models), []
    for weight_format in args.formats.split(","):
        now, before = (
            SteppingEngine(root.resolve(), model.resolve(), weight_format)
            for root in (Path(__file__).parents[2], args.before)
        )
        cases = {}
        for batch in BATCHES:
            for engine in (now, before):
                engine.ask("add", batch, DECODE_PROMPT_LEN, args.steps + 8)
                for _ in range(3):  # the prompts, and a warm-up
                    engine.ask("step")
            cases[f"decode{batch}"] = ratios(now, before, args.steps)
            for engine in (now, before):
                engine.ask("finish")
        cases["prefill"] = ratios(now, before, args.prompts, ("add", 1, PREFILL_LEN, 1))
        for engine in (now, before):
            engine.close()
        for name, found in cases.items():
            low, median, high = statistics.quantiles(found, n=4)
            emit(benchmark="steps_in_turns", format=weight_format, case=name, ratios=[round(each, 3) for each in found])
            rows.append([weight_format, name, f"{median:.3f}", f"{low:.3f}-{high:.3f}"])
    print_table(["weights", "case", "now / before", "middle half"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        main()
