"""What the front end does to the engine's steps: nothing, whether it streams, waits for slow clients, or stands still.

Part of `benchmarks.serve_overhead`. The mock executor makes steps of a fixed time without a processor and writes down when each
began. *Alone* is the core in this process with nobody before it; then a real `inflight serve` gets streams:

    streams   all clients read as fast as it goes
    slow      all read a tenth of what came then, through a remote client's buffers
    stopped   the front end gets SIGSTOP in the middle
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.serving.http_load import Answer, Connection, completion_request, connect_all
from benchmarks.shared.mock_executor import NAME, MockExecutor, StepLog, mock_tokens
from benchmarks.shared.report import emit, percentile, print_table, verdict
from benchmarks.shared.served_process import ServedProcess
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import resolve_config
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.source import read_tokenizer

PROMPT_LEN = 8
STOPPED_SECONDS = 3.0
SETTLE_SECONDS = 0.5  # from the last first byte to the window that counts
SLOWER = 10  # how much less a slow client reads
GOAL = 1.05
SATURATION_STEP_SECONDS = (0.02, 0.01, 0.005, 0.0025)

Periods = npt.NDArray[np.float64]  # seconds


@dataclass(frozen=True, kw_only=True)
class Case:
    """
    Attributes:
        periods: of the steps with all rows, in the window that counts.
        shares: of a core in that window: front end, engine, this load generator.
        events: that the clients got, the usage and the end of each stream included.
        bytes_per_token: that a client got.
        seconds: from the first to the last byte.
        tokens_lost: that clients were not sent.
    """

    name: str
    periods: Periods
    shares: Sequence[float] = (0.0, 0.0, 0.0)
    events: int = 0
    bytes_per_token: float = 0.0
    seconds: float = 0.0
    tokens_lost: int = 0


class StepPeriods:
    """
    Args:
        num_streams: at once; every step has a row of each.
        num_tokens: of each stream; within the model's length.
        step_seconds: of the mock executor.
    """

    def __init__(self, num_streams: int, num_tokens: int, step_seconds: float, folder: Path) -> None:
        self._num_streams, self._num_tokens = num_streams, num_tokens
        self._log = folder / "steps"
        self.seconds = step_seconds
        self._environment = {"MOCK_STEP_SECONDS": str(step_seconds), "MOCK_STEP_LOG": str(self._log)}
        self._options = {
            "distributed_executor_backend": NAME,
            "max_num_seqs": num_streams,
            "max_num_batched_tokens": max(2048, num_streams * PROMPT_LEN),
            "enable_prefix_caching": False,
        }
        self._args = EngineArgs.from_kwargs(self._options)
        self._config = resolve_config(self._args)
        self._tokenizer = read_tokenizer(self._config.model.folder, None)
        self._prompts = [[5 + index % 1000, 7, *range(8, PROMPT_LEN + 6)] for index in range(num_streams)]

    def alone(self) -> Case:
        """The core, with nobody who reads what it makes."""
        with _environment(self._environment):
            executor = MockExecutor(self._config)
        core = make_core(self._config, executor)
        try:
            processor = make_input_processor(self._args, self._config)
            params = SamplingParams(max_tokens=self._num_tokens, ignore_eos=True, temperature=0.0)
            for index, prompt in enumerate(self._prompts):
                request = processor.process(str(index), prompt, params, default_seed=index)
                for sequence in request.sequences:
                    core.add_request(sequence, request.prompt_array)
            gc.collect()
            gc.freeze()  # as the engine's process does
            start = time.perf_counter()
            while core.has_unfinished_requests():
                core.step()
            return Case(name="core alone", periods=self._periods(start + SETTLE_SECONDS, time.perf_counter()))
        finally:
            gc.unfreeze()
            core.close()

    async def streams(self) -> Case:
        return await self._served("streams", None)

    async def slow(self, bytes_per_second: float) -> Case:
        """Of each client."""
        return await self._served("slow clients", bytes_per_second)

    async def stopped(self) -> Case:
        """The window is that of the stop, in which nobody but the engine runs."""
        return await self._served("front end stopped", None, stop=True)

    async def _served(self, name: str, bytes_per_second: float | None, *, stop: bool = False) -> Case:
        requests = [completion_request(prompt, self._num_tokens) for prompt in self._prompts]
        with ServedProcess(self._options, self._environment) as server:
            keeps_all = bytes_per_second is not None or stop
            connections = await connect_all(
                server.port, self._num_streams, bytes_per_second=bytes_per_second, keeps_all=keeps_all
            )
            gc.collect()
            gc.freeze()
            tasks = [
                asyncio.ensure_future(each.send(request)) for each, request in zip(connections, requests, strict=True)
            ]
            await _all_started(connections)
            await asyncio.sleep(SETTLE_SECONDS)
            begin, before = time.perf_counter(), self._cpu(server)
            if stop:
                server.stop_front_end()
                await asyncio.sleep(STOPPED_SECONDS)
                end, after = time.perf_counter(), self._cpu(server)
                server.continue_front_end()
            else:
                end = await self._last_full_step(begin)
                after = self._cpu(server)
            answers = await asyncio.gather(*tasks)
            gc.unfreeze()
            for connection in connections:
                connection.close()
        if keeps_all:
            lost = sum(map(self._lost, answers, self._prompts))
        else:
            lost = sum(self._num_tokens - answer.num_tokens for answer in answers)
        return Case(
            name=name,
            periods=self._periods(begin, end),
            shares=[round((last - first) / (end - begin), 3) for first, last in zip(before, after, strict=True)],
            events=sum(answer.num_events for answer in answers),
            bytes_per_token=sum(answer.num_bytes for answer in answers) / (self._num_tokens * len(answers)),
            seconds=max(answer.ended for answer in answers) - min(answer.first_byte for answer in answers),
            tokens_lost=lost,
        )

    async def _last_full_step(self, begin: float) -> float:
        """When the engine was done with the streams, or nearly: they began before `begin`."""
        while True:
            await asyncio.sleep(0.25)
            last = StepLog.last(self._log)
            if time.perf_counter() - last > 0.2 and last > begin:
                return last

    def _periods(self, begin: float, end: float) -> Periods:
        return StepLog.periods(self._log, self._num_streams, begin, end)

    def _cpu(self, server: ServedProcess) -> tuple[float, float, float]:
        found = server.cpu_seconds()
        front_end = found.pop("front end")
        return front_end, sum(found.values()), time.process_time()

    def _lost(self, answer: Answer, prompt: list[int]) -> int:
        """Tokens that the client was not sent; all of them if his text is not the one that was drawn."""
        texts = [choice["text"] for event in answer.events for choice in event["choices"]]
        drawn = mock_tokens(self._tokenizer, prompt, self._num_tokens)
        is_whole = "".join(texts) == "".join(map(self._tokenizer.decode_token, drawn))
        return self._num_tokens - answer.num_tokens if is_whole else self._num_tokens


def measure(num_streams: int, num_tokens: int, step_seconds: float, rounds: int) -> None:
    """Each case against the core alone, in turns; then what more steps a second do."""
    header = [
        "engine's steps",
        "period ms",
        "p50",
        "p99",
        "growth",
        "goal",
        "front end",
        "engine",
        "clients",
        "events",
        "lost",
    ]
    with tempfile.TemporaryDirectory() as folder:
        steps = StepPeriods(num_streams, num_tokens, step_seconds, Path(folder))
        cases = [case for _ in range(rounds) for case in _round(steps)]
        rows = []
        baseline = _mean_ms(cases, "core alone")
        for name in dict.fromkeys(case.name for case in cases):
            mean = _mean_ms(cases, name)
            periods = np.concatenate([case.periods for case in cases if case.name == name])
            last = [case for case in cases if case.name == name][-1]
            growth = mean / baseline
            met = "" if name == "core alone" else f"<= {GOAL} {verdict(growth <= GOAL)}"
            lost = sum(case.tokens_lost for case in cases if case.name == name)
            p50, p99 = (f"{percentile(periods.tolist(), share) * 1e3:.2f}" for share in (0.5, 0.99))
            rows.append([name, f"{mean:.3f}", p50, p99, f"{growth:.3f}", met, *last.shares, last.events, lost])
        print_table(header, rows)
        rows = []
        for seconds in SATURATION_STEP_SECONDS:
            tokens = min(num_tokens, int(5.0 / seconds))
            case = asyncio.run(StepPeriods(num_streams, tokens, seconds, Path(folder)).streams())
            events = case.events / case.seconds
            row = [num_streams * tokens / case.seconds, events, *case.shares]
            emit(
                benchmark="serve_saturation",
                step_ms=seconds * 1e3,
                tokens_per_s=row[0],
                events_per_s=events,
                shares=case.shares,
            )
            rows.append([f"{seconds * 1e3:g} ms", _mean_ms([case], "streams"), *row])
        header = ["steps of", "period ms", "tokens/s", "events/s", "front end", "engine", "clients"]
        print_table(header, [[row[0], f"{row[1]:.2f}", f"{row[2]:.0f}", f"{row[3]:.0f}", *row[4:]] for row in rows])


def _round(steps: StepPeriods) -> Iterator[Case]:
    yield _said(steps.alone())
    streams = asyncio.run(steps.streams())
    yield _said(streams)
    yield _said(asyncio.run(steps.slow(streams.bytes_per_token / steps.seconds / SLOWER)))
    yield _said(asyncio.run(steps.stopped()))


def _said(case: Case) -> Case:
    emit(
        benchmark="serve_step_period", case=case.name, steps=len(case.periods), mean_ms=_mean_ms([case], case.name),
        p50_ms=percentile(case.periods.tolist(), 0.5) * 1e3, p99_ms=percentile(case.periods.tolist(), 0.99) * 1e3,
        front_end=case.shares[0], engine=case.shares[1], clients=case.shares[2], events=case.events,
        seconds=round(case.seconds, 3), bytes_per_token=round(case.bytes_per_token), tokens_lost=case.tokens_lost,
    )  # fmt: skip
    return case


def _mean_ms(cases: Sequence[Case], name: str) -> float:
    return float(np.concatenate([case.periods for case in cases if case.name == name]).mean() * 1e3)


async def _all_started(connections: Sequence[Connection]) -> None:
    while not all(connection.answer.status for connection in connections):
        await asyncio.sleep(0.05)


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
