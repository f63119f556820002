"""How long streams wait for their next token while long prompts come: with and without a target, and in other engines.

    python -m benchmarks.latency [--model qwen3-0.6b] [--quantization int8] [--targets none,auto,250] [--rounds 2]
                                 [--peers vllm=http://127.0.0.1:8100,llamacpp=http://127.0.0.1:8101]

- **load**: 8 streams decode all the time, and a prompt of 4,000 tokens is sent every 5 s, 6 times. A run ends when each of
  these prompts has its first token. Measured: the gaps between the tokens of a stream, the tokens of prompts and streams per
  second, and the time to the first token of the long prompts.
- **neighbour**: the same, while another process computes on one core for 1 to 4 s, and pauses for 1 to 4 s.
- **busy**: the same, while another process computes all the time. Both have a session of their own, as other programs do.
- **short**: a prompt of 50 tokens is sent while one of 16,000 is computed and nobody decodes. Measured: the time to its first
  token, and the steps that the engine commits until then.

Each target is a server of its own, stopped by SIGSTOP while another one is measured. The order changes from round to round.
Peers are servers that you have started, with an OpenAI API that accepts token ids as a prompt. They are measured in turns, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shared.models import add_model_arguments, model_folder, read_into_page_cache
from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table
from benchmarks.shared.served_process import ServedProcess

NUM_STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 32, 256
NUM_LONG, LONG_PROMPT, LONG_EVERY_SECONDS = 6, 4000, 5.0
SHORT_PROMPT, HUGE_PROMPT = 50, 16_000
SETTLE_SECONDS = 3.0
FIRST_TOKEN_ID, END_TOKEN_ID = 100, 3900
_NEIGHBOUR = """
import random, time
rng = random.Random(0)
while True:
    end = time.monotonic() + rng.uniform(1, 4)
    while time.monotonic() < end:
        pass
    time.sleep(rng.uniform(1, 4))
"""
_BUSY = "while True: pass"
NEIGHBOURS = {"load": None, "neighbour": _NEIGHBOUR, "busy": _BUSY}  # case -> the program that runs beside the server


@dataclass
class Server:
    """A server under load. `process` is None for a peer."""

    label: str
    url: str
    model: str
    process: ServedProcess | None = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.process.processes if self.process is not None else ():
            os.kill(pid, number)

    async def num_steps(self, client: httpx.AsyncClient) -> int | None:
        """How many steps the engine has committed; None for a peer."""
        if self.process is None:
            return None
        text = (await client.get(f"{self.url}/metrics")).text
        line = next(line for line in text.splitlines() if line.startswith("inflight:engine_steps_total"))
        return int(float(line.rsplit(" ", 1)[1]))


@dataclass
class Measured:
    """What one run has measured. Times are in seconds."""

    gaps: list[float] = field(default_factory=list)  # between tokens of a stream
    long_firsts: list[float] = field(default_factory=list)  # times to the first token of long prompts
    num_tokens: int = 0  # of streams
    tokens_per_second: float = 0.0  # of prompts and streams together


class Load:
    def __init__(self, server: Server, client: httpx.AsyncClient, seed: int) -> None:
        self._server, self._client, self._rng = server, client, random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(length)]

    async def tokens(self, length: int, max_tokens: int) -> AsyncGenerator[float, None]:
        """Sends a prompt of `length` random tokens; yields the time of each event that carries a token."""
        body = {
            "model": self._server.model, "prompt": self.prompt(length), "max_tokens": max_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if self._server.process is None:
            body["cache_prompt"] = False  # an option of llama.cpp
        async with self._client.stream("POST", f"{self._server.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{self._server.label}: status {answer.status_code}: {await answer.aread()!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and _has_token(json.loads(line[6:])):
                    yield time.perf_counter()

    async def run(self) -> Measured:
        """Runs the streams and the long prompts together, and measures both."""
        measured, has_ended = Measured(), asyncio.Event()
        streams = [asyncio.create_task(self._stream(measured, has_ended)) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(SETTLE_SECONDS)
        measured.gaps.clear()
        measured.num_tokens, start = 0, time.perf_counter()
        longs = []
        for _ in range(NUM_LONG):
            longs.append(asyncio.create_task(self._first_token(LONG_PROMPT)))
            await asyncio.sleep(LONG_EVERY_SECONDS)
        measured.long_firsts = list(await asyncio.gather(*longs))
        seconds = time.perf_counter() - start
        measured.tokens_per_second = (measured.num_tokens + NUM_LONG * LONG_PROMPT) / seconds
        has_ended.set()
        await asyncio.gather(*streams)
        return measured

    async def _stream(self, measured: Measured, has_ended: asyncio.Event) -> None:
        while not has_ended.is_set():
            last: float | None = None
            async with contextlib.aclosing(self.tokens(STREAM_PROMPT, STREAM_TOKENS)) as times:
                async for now in times:
                    if last is not None:
                        measured.gaps.append(now - last)
                    last = now
                    measured.num_tokens += 1
                    if has_ended.is_set():
                        break

    async def _first_token(self, length: int) -> float:
        start = time.perf_counter()
        async with contextlib.aclosing(self.tokens(length, 1)) as times:
            async for now in times:
                return now - start
        raise SystemExit(f"{self._server.label}: a stream without a token")

    async def short_behind_huge(self) -> tuple[float, int | None]:
        """(seconds to the first token of the short prompt, steps committed until then)."""
        huge = asyncio.create_task(self._first_token(HUGE_PROMPT))
        await asyncio.sleep(SETTLE_SECONDS)
        before = await self._server.num_steps(self._client)
        seconds = await self._first_token(SHORT_PROMPT)
        after = await self._server.num_steps(self._client)
        await huge
        return seconds, None if before is None or after is None else after - before


def _has_token(event: dict[str, Any]) -> bool:
    """Whether an event of a stream carries a token. The last event of llama.cpp has an empty text and no token."""
    choices: list[dict[str, Any]] = event.get("choices") or []
    return bool(choices) and bool(choices[0].get("token_ids") or choices[0]["text"] or not choices[0]["finish_reason"])


@contextlib.contextmanager
def neighbour(program: str | None) -> Iterator[None]:
    if program is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _measure(server: Server, case: str, seed: int) -> Any:  # Any: Measured, or what `short_behind_huge` returns
    async with httpx.AsyncClient(timeout=600) as client:
        load = Load(server, client, seed)
        if case == "short":
            return await load.short_behind_huge()
        with neighbour(NEIGHBOURS[case]):
            return await load.run()


def start_server(folder: Path, target: str, options: dict[str, Any], stack: ExitStack) -> Server:
    given = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_model_len": HUGE_PROMPT + 64,
        "max_num_seqs": NUM_STREAMS + NUM_LONG + 2,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": "4G",
        "served_model_name": "model",
        "target_inter_token_latency": target,
        "max_step_time": "none" if target == "none" else "1000",
        **options,
    }
    process = stack.enter_context(ServedProcess(given))
    return Server(f"target {target}", f"http://127.0.0.1:{process.port}", "model", process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="format of the weights; bf16 if not given")
    parser.add_argument(
        "--targets", default="none,auto,250", help="values of --target-inter-token-latency [%(default)s]"
    )
    parser.add_argument("--cases", default="load,neighbour,short", help="[%(default)s]")
    parser.add_argument("--peers", default="", metavar="NAME=URL[=MODEL],...", help="running servers of other engines")
    parser.add_argument("--rounds", type=int, default=2, help="[%(default)s]")
    args = parser.parse_args()
    allow_slow_steps()
    folder = model_folder(args.model, args.models)
    read_into_page_cache(folder)
    options = {} if args.quantization is None else {"quantization": args.quantization}
    found: dict[tuple[str, str], list[Any]] = {}
    with ExitStack() as stack:
        servers = [start_server(folder, target, options, stack) for target in args.targets.split(",") if target]
        for peer in filter(None, args.peers.split(",")):
            name, url, *model = peer.split("=")
            servers.append(Server(name, url, model[0] if model else "model"))
        for server in servers:
            server.pause()
        try:
            for round_index, case in itertools.product(range(args.rounds), args.cases.split(",")):
                for server in servers if round_index % 2 == 0 else servers[::-1]:
                    server.resume()
                    result = asyncio.run(_measure(server, case, round_index))
                    server.pause()
                    found.setdefault((case, server.label), []).append(result)
                    emit(benchmark="latency", round=round_index, **_row(case, server.label, [result]))
        finally:
            for server in servers:
                server.resume()
    for case in args.cases.split(","):
        rows = [_row(case, label, results) for (found_case, label), results in found.items() if found_case == case]
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _row(case: str, label: str, results: Sequence[Any]) -> dict[str, Any]:
    """The figures of one server in one case, over the given results."""
    row: dict[str, Any] = {"case": case, "server": label}
    if case == "short":
        steps = [steps for _, steps in results if steps is not None]
        return row | {
            "first_token_ms": round(statistics.median(seconds for seconds, _ in results) * 1e3),
            "most_steps": max(steps, default="unknown"),
        }
    gaps, target = [gap for each in results for gap in each.gaps], label.removeprefix("target ")
    return row | {
        "gap_p50_ms": round(percentile(gaps, 0.5) * 1e3),
        "gap_p99_ms": round(percentile(gaps, 0.99) * 1e3),
        "gap_max_ms": round(max(gaps) * 1e3),
        "p99_of_target": round(percentile(gaps, 0.99) * 1e3 / float(target), 2) if target.isdecimal() else "",
        "tokens_per_s": round(statistics.median(each.tokens_per_second for each in results), 1),
        "stream_tokens": sum(each.num_tokens for each in results),
        "long_first_s": round(statistics.median(first for each in results for first in each.long_firsts), 1),
    }


if __name__ == "__main__":
    main()
