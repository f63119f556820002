"""`generate_load`: send every request at its time, whatever becomes of those before it, and gather the records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.entrypoints.bench_serve.client import BenchClient
from inflight.entrypoints.bench_serve.dataset import BenchRequest
from inflight.entrypoints.bench_serve.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was measured.

    Attributes:
        records: in the order of the requests.
        seconds: from the start to the last end.
        cpu_seconds: processor time that the client itself took: it shares the machine with a local server.
    """

    records: list[RequestRecord]
    seconds: float
    cpu_seconds: float


async def generate_load(
    client: BenchClient,
    model: str,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Load:
    """`times`: of each request, seconds after the start, ascending. `on_end` is called after each.

    Bodies are made before the start. With `max_concurrency` a request waits until fewer are under way: that wait is its
    `queue_time`, not part of its latency.
    """
    bodies = [json.dumps(client.request_body(model, request)).encode() for request in requests]
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def one(index: int, due: float) -> RequestRecord:
        ready = time.perf_counter()
        async with slots:
            record = await client.send(bodies[index], requests[index].num_prompt_tokens or 0)
        record.lag = ready - due
        record.queue_time = record.sent - ready
        on_end()
        return record

    gc.collect()
    gc.freeze()  # prompts are no work for a collection in the middle of a measurement
    try:
        start_cpu, start = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, offset in enumerate(times):
                if (delay := start + offset - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(one(index, start + offset)))
        end = max((task.result().ended for task in tasks), default=start)
        cpu_seconds = time.process_time() - start_cpu
    finally:
        gc.unfreeze()
    return Load(records=[task.result() for task in tasks], seconds=end - start, cpu_seconds=cpu_seconds)
