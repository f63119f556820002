"""Models by name: streams beside a load, a load against a plain start, and what many swaps leave behind.

    python -m benchmarks.several_models [gaps] [loads] [swaps] [--model qwen3-0.6b] [--quantization int8] [--rounds 5]
                                        [--swaps 100]

- gaps: the 99th percentile of the gaps between the tokens of 8 streams while another model is loaded, against the streams
  alone; windows of the same length take turns. Goal: at most 1.5. The models have the same shape.
- loads: the time of a load by name, without streams, against a plain start of a server with this model, in turns. Goal: at most
  1.2. With the two processes that wait for the next model, and without them.
- swaps: one model may be loaded, and requests name two in turns: processes, shared memory and resident memory after the first
  swaps and after the last. Goal: the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.compare.table import Spread
from benchmarks.serving.latency import NUM_STREAMS, STREAM_PROMPT, Load, Server
from benchmarks.shared.models import add_model_arguments, model_folder, read_into_page_cache
from benchmarks.shared.report import MIB, allow_slow_steps, emit, percentile, print_table, verdict
from benchmarks.shared.served_process import ServedProcess

GAP_GOAL, LOAD_GOAL = 1.5, 1.2
SETTLE_SECONDS, SPARE_SECONDS = 3.0, 12.0  # the next processes are started 2 s after a load, with the lowest priority
STREAM_TOKENS = 2000
FIRST_SWAPS = 6  # until caches and allocators of the router are as large as they become
NAMES = ("first", "second")


@contextlib.contextmanager
def router(folder: Path, options: dict[str, Any], **more: Any) -> Iterator[ServedProcess]:
    """A server of two models by name, which are one model."""
    with tempfile.TemporaryDirectory() as place:
        presets = Path(place, "presets.ini")
        presets.write_text("".join(f"[{name}]\nmodel = {folder.resolve()}\n" for name in NAMES), encoding="utf-8")
        with ServedProcess({"models_preset": str(presets), **options, **more}) as server:
            yield server


class Models:
    """The models of a running router."""

    def __init__(self, server: ServedProcess, client: httpx.AsyncClient) -> None:
        self.url, self._client = f"http://127.0.0.1:{server.port}", client
        self._server = server

    def load(self, name: str, seed: int) -> Load:
        return Load(Server(name, self.url, name, self._server), self._client, seed)

    async def change(self, name: str, what: str) -> float:
        """Loads or unloads a model; returns the seconds until it is so."""
        start = time.perf_counter()
        answer = await self._client.post(f"{self.url}/models/{what}", json={"model": name})
        answer.raise_for_status()
        while True:
            found = (await self._client.get(f"{self.url}/v1/models")).json()["data"]
            status = next(each["status"] for each in found if each["id"] == name)
            if status["value"] == f"{what}ed":
                return time.perf_counter() - start
            if status.get("error"):
                raise SystemExit(f"{name} is not {what}ed: {status['error']}")
            await asyncio.sleep(0.01)


async def gaps(server: ServedProcess, rounds: int) -> list[str]:
    async with httpx.AsyncClient(timeout=600) as client:
        models = Models(server, client)
        await models.change(NAMES[0], "load")
        times: list[tuple[float, float]] = []  # of a token, and of the one before
        has_ended = asyncio.Event()

        async def stream(seed: int) -> None:
            while not has_ended.is_set():
                last: float | None = None
                tokens = models.load(NAMES[0], seed).tokens(STREAM_PROMPT, STREAM_TOKENS)
                async with contextlib.aclosing(tokens) as found:
                    async for now in found:
                        if last is not None:
                            times.append((now, last))
                        last = now
                        if has_ended.is_set():
                            break

        streams = [asyncio.create_task(stream(seed)) for seed in range(NUM_STREAMS)]
        await asyncio.sleep(SETTLE_SECONDS)
        windows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for index in range(rounds):
            await asyncio.sleep(SPARE_SECONDS)
            begin = time.perf_counter()
            seconds = await models.change(NAMES[1], "load")
            windows[True].append((begin, time.perf_counter()))
            emit(benchmark="several_models", case="load beside streams", round=index, seconds=round(seconds, 2))
            await models.change(NAMES[1], "unload")
            await asyncio.sleep(SPARE_SECONDS)
            begin = time.perf_counter()
            await asyncio.sleep(seconds)
            windows[False].append((begin, time.perf_counter()))
        has_ended.set()
        await asyncio.gather(*streams)
    p99 = {beside: percentile(_gaps_within(times, found), 0.99) * 1e3 for beside, found in windows.items()}
    ratio = p99[True] / p99[False]
    emit(benchmark="several_models", case="gaps", alone_ms=p99[False], beside_ms=p99[True], ratio=ratio)
    shown = (f"{p99[beside]:.1f} ms" for beside in (False, True))
    return [
        "p99 gap of 8 streams: alone, beside a load",
        *shown,
        f"{ratio:.2f}",
        f"{GAP_GOAL}",
        verdict(ratio <= GAP_GOAL),
    ]


def _gaps_within(times: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Gaps that overlap a window: the one in which a stream waits may begin before it, and end behind it."""
    return [now - last for now, last in times if any(last < end and now > begin for begin, end in windows)]


def loads(folder: Path, options: dict[str, Any], rounds: int, *, has_spare: bool) -> list[str]:
    async def one(server: ServedProcess) -> float:
        async with httpx.AsyncClient(timeout=600) as client:
            models = Models(server, client)
            await asyncio.sleep(SPARE_SECONDS if has_spare else 0.0)
            seconds = await models.change(NAMES[0], "load")
            await models.change(NAMES[0], "unload")
            return seconds

    ratios, found = [], []
    with router(folder, options, models_spare=has_spare) as server:
        for index in range(rounds + 1):
            by_name = asyncio.run(one(server))
            with ServedProcess({"model": str(folder), **options}) as plain:
                seconds = plain.cold_start_seconds
            if index:  # the first brings files into the page cache, and packs the weights
                found.append((seconds, by_name))
                ratios.append(by_name / seconds)
                emit(benchmark="several_models", case="loads", has_spare=has_spare, plain_s=seconds, by_name_s=by_name)
    ratio = Spread.of(ratios)
    shown = (f"{statistics.median(each[place] for each in found):.2f} s" for place in (0, 1))
    name = f"plain start, load by name {'with' if has_spare else 'without'} waiting processes"
    return [name, *shown, str(ratio), f"{LOAD_GOAL}", verdict(ratio.median <= LOAD_GOAL)]


def swaps(folder: Path, options: dict[str, Any], count: int) -> list[str]:
    async def run(server: ServedProcess) -> list[tuple[int, int, int]]:
        states = []
        async with httpx.AsyncClient(timeout=600) as client:
            models = Models(server, client)
            for index in range(count):
                async for _ in models.load(NAMES[index % 2], index).tokens(STREAM_PROMPT, 1):
                    pass
                if index in (FIRST_SWAPS, count - 1):
                    await asyncio.sleep(SPARE_SECONDS)
                    states.append(_state(server))
                    emit(benchmark="several_models", case="swaps", after=index + 1, state=states[-1])
        return states

    files = set(os.listdir("/dev/shm"))
    with router(folder, options, models_max=1) as server:
        first, last = asyncio.run(run(server))
    left = set(os.listdir("/dev/shm")) - files
    is_met = last[:2] == first[:2] and not left and last[2] - first[2] < 16 * MIB
    shown = (
        "{} processes, {} segments, {} MiB of the router".format(*each[:2], each[2] // MIB) for each in (first, last)
    )
    return [
        f"after {FIRST_SWAPS + 1} and after {count} swaps",
        *shown,
        f"left at the end: {len(left)}",
        "",
        verdict(is_met),
    ]


def _state(server: ServedProcess) -> tuple[int, int, int]:
    """Processes of a server, segments of shared memory, and resident bytes of the server's first process."""
    return len(server.processes), len(os.listdir("/dev/shm")), server.memory_bytes()["front end"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="gaps|loads|swaps", help="[all]")
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="[bf16]")
    parser.add_argument("--rounds", type=int, default=5, help="of gaps and loads [%(default)s]")
    parser.add_argument("--swaps", type=int, default=100, help="[%(default)s]")
    args = parser.parse_args()
    cases = args.cases or ["gaps", "loads", "swaps"]
    if args.swaps <= FIRST_SWAPS or args.rounds < 1 or not {"gaps", "loads", "swaps"}.issuperset(cases):
        parser.error(f"cases are gaps, loads and swaps, --rounds is 1 or more, --swaps more than {FIRST_SWAPS}")
    allow_slow_steps()
    folder = model_folder(args.model, args.models)
    read_into_page_cache(folder)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_model_len": STREAM_PROMPT + STREAM_TOKENS, "kv_cache_memory_bytes": "1G",
    }  # fmt: skip
    if args.quantization is not None:
        options["quantization"] = args.quantization
    rows = []
    if "gaps" in cases:
        with router(folder, options) as server:
            rows.append(asyncio.run(gaps(server, args.rounds)))
    if "loads" in cases:
        rows += [loads(folder, options, args.rounds, has_spare=has_spare) for has_spare in (True, False)]
    if "swaps" in cases:
        rows.append(swaps(folder, options, args.swaps))
    print_table(["", "first", "second", "ratio", "goal", ""], rows)


if __name__ == "__main__":
    main()
