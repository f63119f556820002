"""Ten times more requests than the engine can serve, for a minute, and none of them waits for another's answer.

    python -m benchmarks.serve_overload [--seconds 60] [--factor 10] [--client-processes 1]

The mock executor makes the capacity known: `SLOTS` requests run at once, each for `TOKENS` steps of a fixed time. The queue is
bounded, the rest gets a 503. In the same run before it: exactly full load, so many clients that slots and queue are just full,
each of whom sends his next request when he has an answer. Goals: refusals in 50 ms (p99), the p99 latency of admitted requests
1.5 times that of full load, and memory of all processes flat from `SETTLE_SECONDS` on (within 8 MiB each).

Requests are sent at their times, whatever becomes of those before. A client that is late says so: `lag`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import uvloop

from benchmarks.serving.http_load import Connection, completion_request
from benchmarks.shared.mock_executor import NAME
from benchmarks.shared.report import MIB, allow_slow_steps, emit, percentile, print_table, verdict
from benchmarks.shared.served_process import ServedProcess

SLOTS, QUEUE, TOKENS, STEP_SECONDS = 16, 16, 64, 0.005
CAPACITY = SLOTS / (TOKENS * STEP_SECONDS)  # requests per second, if steps took no longer than they should
PROMPT_LEN = 16
SETTLE_SECONDS = 10.0
REFUSED_SECONDS = 0.02  # at full load: the server's view of its queue is 50 ms old at most, and it refuses a few
REFUSAL_GOAL_SECONDS, LATENCY_GOAL, GROWTH_GOAL_BYTES = 0.05, 1.5, 8 * MIB


@dataclass(frozen=True)
class Result:
    """Seconds. `latencies` of what was admitted, `lags`: how late each request was sent."""

    latencies: list[float]
    refusals: list[float]
    lags: list[float]
    failures: list[int]  # any other status
    cpu_share: float  # of a core, of this client


class Clients:
    """Open and closed loops over kept connections; a new one is made where all are busy."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._free: list[Connection] = []
        self._result = Result([], [], [], [], 0.0)

    async def one(self, due: float) -> None:
        connection = None
        while self._free and connection is None:
            free = self._free.pop()
            connection = free if free.is_open else None
        self._result.lags.append(time.perf_counter() - due)
        if connection is None:
            connection = Connection()
            await connection.connect(self._port)
        prompt = [self._rng.randrange(5, 1500) for _ in range(PROMPT_LEN)]
        answer = await connection.send(completion_request(prompt, TOKENS))
        if answer.status == 200:
            assert answer.num_tokens == TOKENS
            self._result.latencies.append(answer.ended - answer.sent)
        elif answer.status == 503:
            self._result.refusals.append(answer.ended - answer.sent)
        else:
            self._result.failures.append(answer.status)
        self._free.append(connection)

    async def open_loop(self, rate: float, seconds: float) -> Result:
        """Poisson arrivals."""
        start, cpu = time.perf_counter(), time.process_time()
        due = start
        async with asyncio.TaskGroup() as group:
            while (due := due + self._rng.expovariate(rate)) < start + seconds:
                if (delay := due - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                group.create_task(self.one(due))
        return self._end(start, cpu)

    async def closed_loop(self, count: int, seconds: float) -> Result:
        start, cpu = time.perf_counter(), time.process_time()

        async def again_and_again() -> None:
            while time.perf_counter() < start + seconds:
                num_refused = len(self._result.refusals)
                await self.one(time.perf_counter())
                if len(self._result.refusals) > num_refused:
                    await asyncio.sleep(REFUSED_SECONDS)

        await asyncio.gather(*(again_and_again() for _ in range(count)))
        return self._end(start, cpu)

    def _end(self, start: float, cpu: float) -> Result:
        for connection in self._free:
            connection.close()
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
        return Result(**{**vars(self._result), "cpu_share": share})


def open_loop(port: int, rate: float, seconds: float, seed: int) -> Result:
    """In a process of its own."""
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Clients(port, seed).open_loop(rate, seconds))


def closed_loop(port: int, count: int, seconds: float) -> Result:
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Clients(port, 0).closed_loop(count, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of overload; full load takes a quarter [%(default)s]"
    )
    parser.add_argument("--factor", type=float, default=10.0, help="times the capacity [%(default)s]")
    parser.add_argument("--client-processes", type=int, default=1, help="that share the load [%(default)s]")
    options = parser.parse_args()
    if options.seconds < 1.5 * SETTLE_SECONDS:
        parser.error(f"--seconds must be {1.5 * SETTLE_SECONDS:g} or more")
    allow_slow_steps()
    server_options = {
        "distributed_executor_backend": NAME,
        "max_num_seqs": SLOTS,
        "max_queued_requests": QUEUE,
        "enable_prefix_caching": False,
    }
    rate = options.factor * CAPACITY
    num_processes = options.client_processes
    with (
        ServedProcess(server_options, {"MOCK_STEP_SECONDS": str(STEP_SECONDS)}) as server,
        ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool,
    ):
        # the full load goes first, and everything that is made once is made then
        full = pool.submit(closed_loop, server.port, SLOTS + QUEUE, options.seconds / 4).result()
        begin, before = time.perf_counter(), server.cpu_seconds()
        clients = [
            pool.submit(open_loop, server.port, rate / num_processes, options.seconds, seed)
            for seed in range(num_processes)
        ]
        memory = []
        while (left := begin + options.seconds - time.perf_counter()) > 1.0:
            time.sleep(min(SETTLE_SECONDS, left - 0.5))
            memory.append(server.memory_bytes())
        cpu, seconds = server.cpu_seconds(), time.perf_counter() - begin
        results = [client.result() for client in clients]
    shares = {name: round((cpu[name] - before[name]) / seconds, 2) for name in cpu}
    _report(rate, full, results, shares, memory)


def _report(
    rate: float, full: Result, results: Sequence[Result], shares: dict[str, float], memory: Sequence[dict[str, int]]
) -> None:
    """`memory`: every `SETTLE_SECONDS`."""
    latencies = [each for result in results for each in result.latencies]
    refusals = [each for result in results for each in result.refusals]
    lags = [each for result in results for each in result.lags]
    failures = [each for result in (full, *results) for each in result.failures]
    refused = percentile(refusals, 0.99)
    admitted, at_full = percentile(latencies, 0.99), percentile(full.latencies, 0.99)
    worst = max(memory[-1][name] - first for name, first in memory[0].items())
    emit(
        benchmark="serve_overload", requests_per_s=rate, admitted=len(latencies), refused=len(refusals), failed=failures,
        refusal_p50_ms=statistics.median(refusals) * 1e3, refusal_p99_ms=refused * 1e3, refusal_max_ms=max(refusals) * 1e3,
        latency_p50_ms=statistics.median(latencies) * 1e3, latency_p99_ms=admitted * 1e3,
        full_load_p50_ms=statistics.median(full.latencies) * 1e3, full_load_p99_ms=at_full * 1e3,
        full_load_requests=len(full.latencies), full_load_refused=len(full.refusals), memory_bytes=memory,
        server_shares_of_a_core=shares, client_shares=[round(result.cpu_share, 2) for result in results],
        lag_p99_ms=percentile(lags, 0.99) * 1e3, lag_max_ms=max(lags) * 1e3,
    )  # fmt: skip
    goal = REFUSAL_GOAL_SECONDS
    print_table(
        [f"{rate:.0f} requests/s, capacity {CAPACITY:.0f}", "value", "goal", ""],
        [
            ["admitted / refused / failed", f"{len(latencies)} / {len(refusals)} / {len(failures)}", "", ""],
            ["503, p99", f"{refused * 1e3:.1f} ms", f"{goal * 1e3:.0f} ms", verdict(refused <= goal)],
            ["latency at full load, p99", f"{at_full * 1e3:.0f} ms", "", ""],
            [
                "latency of the admitted, p99",
                f"{admitted * 1e3:.0f} ms",
                f"{LATENCY_GOAL * at_full * 1e3:.0f} ms",
                verdict(admitted <= LATENCY_GOAL * at_full),
            ],
            ["memory, the worst process", f"{worst / MIB:+.1f} MiB", "8 MiB", verdict(worst <= GROWTH_GOAL_BYTES)],
            ["sent late, p99", f"{percentile(lags, 0.99) * 1e3:.1f} ms", "", ""],
            ["client's share of a core", f"{max(result.cpu_share for result in results):.2f}", "", ""],
            ["server's shares of a core", ", ".join(f"{name} {share}" for name, share in shares.items()), "", ""],
        ],
    )


if __name__ == "__main__":
    main()
