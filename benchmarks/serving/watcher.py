"""What it costs to watch an engine: 256 streams with and without a reader of `/v1/engine/live`, in turns.

    python -m benchmarks.watcher [--model qwen3-0.6b] [--quantization int8] [--streams 256] [--rounds 20] [--seconds 5]

All streams run all the time; windows of the same length take turns, with a watcher and without. A ratio is of two neighbouring
windows. The processor time of the server for each token stands beside it: other programs disturb it less. Goal: a watcher costs
at most 1 % of the tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.compare.table import Spread
from benchmarks.serving.http_load import Connection, completion_request, connect_all
from benchmarks.shared.models import add_model_arguments, model_folder, read_into_page_cache
from benchmarks.shared.report import allow_slow_steps, emit, print_table, verdict
from benchmarks.shared.served_process import ServedProcess

GOAL = 0.99
PROMPT_LEN, NUM_TOKENS = 8, 1000
SETTLE_SECONDS, TURN_SECONDS = 5.0, 0.5
_WATCH = b"GET /v1/engine/live HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n"


class Window(NamedTuple):
    tokens_per_second: float
    processor_us_per_token: float


class Streams:
    def __init__(self, server: ServedProcess, connections: list[Connection]) -> None:
        self._server, self._connections = server, connections
        self._ended = 0  # events of answers that have ended
        self._tasks = [asyncio.ensure_future(self._run(index, each)) for index, each in enumerate(connections)]

    async def _run(self, seed: int, connection: Connection) -> None:
        prompt = [5 + seed % 1000, 7, *range(8, PROMPT_LEN + 6)]
        while True:
            answer = await connection.send(completion_request(prompt, NUM_TOKENS))
            if answer.status != 200:
                raise SystemExit(f"status {answer.status}: {b''.join(answer.pieces)!r}")
            self._ended += answer.num_events
            connection.answer.num_events = 0

    def num_events(self) -> int:
        return self._ended + sum(each.answer.num_events for each in self._connections)

    async def window(self, seconds: float) -> Window:
        begin, events, before = time.perf_counter(), self.num_events(), sum(self._server.cpu_seconds().values())
        await asyncio.sleep(seconds)
        used, tokens = sum(self._server.cpu_seconds().values()) - before, self.num_events() - events
        return Window(tokens / (time.perf_counter() - begin), used / tokens * 1e6)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            connection.close()


@contextlib.asynccontextmanager
async def watcher(port: int) -> Any:  # Any: an asynchronous context manager
    [connection] = await connect_all(port, 1)
    reading = asyncio.ensure_future(connection.send(_WATCH))
    try:
        yield connection
    finally:
        if connection.answer.status != 200:
            raise SystemExit(f"the feed answers with status {connection.answer.status}")
        reading.cancel()
        connection.close()


async def run(server: ServedProcess, num_streams: int, rounds: int, seconds: float) -> list[list[str]]:
    streams = Streams(server, await connect_all(server.port, num_streams))
    await asyncio.sleep(SETTLE_SECONDS)
    found: dict[bool, list[Window]] = {False: [], True: []}
    for index in range(rounds):
        for watched in (False, True) if index % 2 else (True, False):
            async with contextlib.AsyncExitStack() as stack:
                connection = await stack.enter_async_context(watcher(server.port)) if watched else None
                await asyncio.sleep(TURN_SECONDS)
                found[watched].append(await streams.window(seconds))
                events = 0 if connection is None else connection.answer.num_events
            emit(benchmark="watcher", round=index, watched=watched, events=events, **found[watched][-1]._asdict())
    await streams.close()
    rows = []
    for name, place in (("tokens/s", 0), ("processor us a token", 1)):
        ratio = Spread.of([with_[place] / without[place] for without, with_ in zip(*found.values(), strict=True)])
        medians = (f"{statistics.median(each[place] for each in windows):.1f}" for windows in found.values())
        shown = [f"{GOAL}", verdict(ratio.median >= GOAL)] if place == 0 else ["", ""]
        rows.append([name, *medians, str(ratio), *shown])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="[bf16]")
    parser.add_argument("--streams", type=int, default=256, help="at the same time [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="of two windows [%(default)s]")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window [%(default)s]")
    args = parser.parse_args()
    if min(args.streams, args.rounds) < 1 or args.seconds <= 0:
        parser.error("--streams, --rounds and --seconds must be greater than 0")
    allow_slow_steps()
    folder = model_folder(args.model, args.models)
    read_into_page_cache(folder)
    options: dict[str, Any] = {
        "model": str(folder), "skip_tokenizer_init": True, "max_model_len": PROMPT_LEN + NUM_TOKENS,
        "max_num_seqs": args.streams, "kv_cache_memory_bytes": "4G",
    }  # fmt: skip
    if args.quantization is not None:
        options["quantization"] = args.quantization
    with ServedProcess(options) as server:
        rows = asyncio.run(run(server, args.streams, args.rounds, args.seconds))
    print_table(["", "alone", "watched", "watched / alone", "goal", ""], rows)


if __name__ == "__main__":
    main()
