"""One engine in a process of its own, told what to do over a pipe; while it waits it uses no processor time.

    parent  ── {"batch_size": 8, "input_len": 16, "output_len": 64} ──▶  python -m benchmarks.engine_process ENGINE FOLDER
            ◀── {"seconds": 1.23, "num_tokens": 512} ──

The first line of the child is {"import_s", "construct_s", "first_token_s"}: seconds for the imports, for the constructor, and
from the constructor's call (Inflight loads torch there) to the first token of a short prompt. An empty line asks for
{"peak_bytes"}; end of file ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.report import memory_bytes
from inflight.entrypoints.cli.workloads import WARM_UP, Workload

ENGINES = ("inflight", "transformers")
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens for each -> tokens produced


class EngineProcess:
    """The parent's side. A context manager; leaving it ends the process."""

    def __init__(self, engine: str, folder: Path, kv_cache_memory_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engine_process", engine, str(folder), str(kv_cache_memory_bytes)]
        self.engine = engine
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.startup: dict[str, float] = self._reply()

    def run(self, workload: Workload) -> float:
        """Seconds."""
        fields = {name: getattr(workload, name) for name in ("batch_size", "input_len", "output_len")}
        reply = self._ask(json.dumps(fields))
        assert reply["num_tokens"] == workload.batch_size * workload.output_len, (self.engine, workload, reply)
        seconds: float = reply["seconds"]
        return seconds

    def peak_bytes(self) -> int:
        """The most memory the process has had resident."""
        peak: int = self._ask("")["peak_bytes"]
        return peak

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with exit code {self._process.wait()}; its errors are above")
        reply: dict[str, Any] = json.loads(line)
        return reply


# -- the child ---------------------------------------------------------------------------------------------------------


def start_inflight(folder: str, kv_cache_memory_bytes: int) -> Callable[[], Generate]:
    from inflight import LLM, SamplingParams

    def construct() -> Generate:
        llm = LLM(
            folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )

        def generate(prompts: list[list[int]], output_len: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return generate

    return construct


def start_transformers(folder: str, kv_cache_memory_bytes: int) -> Callable[[], Generate]:
    """One batch, left-padded, sdpa, inference mode: what `generate` does best without further packages."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def construct() -> Generate:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        model.generation_config.eos_token_id = None  # every token counts, as with ignore_eos
        model.generation_config.pad_token_id = 0

        @torch.inference_mode()
        def generate(prompts: list[list[int]], output_len: int) -> int:
            longest = max(map(len, prompts))
            padding = [longest - len(ids) for ids in prompts]
            input_ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, prompts, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * len(ids) for pad, ids in zip(padding, prompts, strict=True)])
            output = model.generate(
                input_ids=input_ids, attention_mask=mask, max_new_tokens=output_len, do_sample=False
            )
            return int(output[:, longest:].numel())

        return generate

    return construct


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine behind a pipe; used by the other benchmarks.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder")
    parser.add_argument("kv_cache_memory_bytes", type=int)
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr

    def reply(**fields: Any) -> None:  # Any: JSON
        print(json.dumps(fields), file=replies, flush=True)

    start = time.perf_counter()
    prepare = start_inflight if args.engine == "inflight" else start_transformers
    construct = prepare(args.folder, args.kv_cache_memory_bytes)
    imported = time.perf_counter()
    generate = construct()
    constructed = time.perf_counter()
    generate(WARM_UP.prompts(), 1)
    answered = time.perf_counter()
    generate(WARM_UP.prompts(), WARM_UP.output_len)
    reply(import_s=imported - start, construct_s=constructed - imported, first_token_s=answered - imported)
    for line in sys.stdin:
        if not line.strip():
            reply(peak_bytes=memory_bytes("VmHWM"))
            continue
        workload = Workload("", **json.loads(line))
        prompts = workload.prompts()
        start = time.perf_counter()
        num_tokens = generate(prompts, workload.output_len)
        reply(seconds=time.perf_counter() - start, num_tokens=num_tokens)


if __name__ == "__main__":
    main()
