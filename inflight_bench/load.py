"""Sends each request at its planned time, even if earlier requests still run, and collects the records of all requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inflight_bench.client import BenchClient
from inflight_bench.dataset import BenchRequest
from inflight_bench.options import TrafficOptions
from inflight_bench.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The results of one run of the load generator.

    Attributes:
        records: one record for each request, in the order of the requests.
        seconds: from the start until the last request ended.
        cpu_seconds: processor time of the load generator. A server on the same machine could not use this time.
    """

    records: list[RequestRecord]
    seconds: float
    cpu_seconds: float


def arrival_times(options: TrafficOptions, num_requests: int, rng: np.random.Generator) -> list[float]:
    """Returns when requests are sent: seconds after the start, in ascending order. The times do not depend on the answers.

    The gaps between requests have a gamma distribution with the shape `burstiness`. With 1, this is a Poisson process. With
    `burst_on` and `burst_off`, requests are sent for `burst_on` seconds, then none for `burst_off` seconds, and so on. If the
    rate does not ramp up, the last request is sent at num_requests / request_rate seconds plus these pauses.
    """
    ramp, start, end = options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
    if ramp is None and math.isinf(options.request_rate):
        return [0.0] * num_requests
    gaps = rng.gamma(options.burstiness, 1 / options.burstiness, num_requests)  # their mean is 1
    if ramp is None:
        times = np.cumsum(gaps)
        times *= num_requests / options.request_rate / times[-1]
    else:
        assert start is not None and end is not None
        space = np.linspace if ramp == "linear" else np.geomspace
        times = np.cumsum(gaps / space(start, end, num_requests))
    if options.burst_on is not None and options.burst_off is not None:
        times += np.floor(times / options.burst_on) * options.burst_off
    return [float(time) for time in times]


async def generate_load(
    client: BenchClient,
    model: str,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Load:
    """Send each request at its time in `times` (ascending, in seconds after the start). Call `on_end` after each request.

    The JSON of all requests is made before the start. With `max_concurrency`, a request waits while that many other requests
    are running. This waiting time is the record's `queue_time`, and is not a part of the latency.
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
    gc.freeze()  # so that the garbage collector does not scan the prompts during the measurement
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
