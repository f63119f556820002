"""`PlanAhead`: drives an executor with plans made several steps ahead of their results, slots and blocks reused at once.

It decides by random numbers what a scheduler would decide by policy: who is computed, in which chunks, who is preempted. A
request that is planned to its end leaves its slot and blocks to the next one while its own last steps are still under way; a
preempted one waits until its steps have ended, and comes back with all its tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from inflight.executor.executor import Executor
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import BlockTableDelta, ModelRunnerOutput, NewRequestData, SchedulerOutput


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass(eq=False)
class Job:
    """One request. `tokens` are known; `num_planned` counts those that steps under way will draw, too."""

    name: str
    prompt: list[int]
    sampling: ResolvedSampling
    tokens: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    slot: int = -1
    blocks: list[tuple[int, ...]] = field(default_factory=list)  # one id per KV group

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_planned = len(self.prompt)

    @property
    def is_planned(self) -> bool:
        return self.num_planned == len(self.prompt) + self.sampling.max_tokens


class PlanAhead:
    """
    Args:
        depth: steps under way at most.
        step_ids: where the last drive of the executor left off.
        max_chunk: tokens of a prompt in one step.
    """

    def __init__(
        self,
        executor: Executor,
        jobs: list[Job],
        *,
        step_ids: Iterator[int],
        depth: int,
        num_slots: int,
        block_size: int,
        num_groups: int,
        num_blocks: int,
        max_chunk: int,
        seed: int,
    ) -> None:
        self.executor, self.depth, self.block_size, self.num_groups = executor, depth, block_size, num_groups
        self.step_ids, self.max_chunk = step_ids, max_chunk
        self.rng = random.Random(seed)
        self.waiting = deque(jobs)
        self.running: list[Job] = []
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(1, num_blocks))
        self.num_preemptions = 0
        self.in_flight: deque[tuple[SchedulerOutput, list[Job], Future[ModelRunnerOutput]]] = deque()

    def run(self) -> None:
        while self.waiting or self.running or self.in_flight:
            while len(self.in_flight) < self.depth and (rows := self.choose()):
                plan, jobs = self.plan(next(self.step_ids), rows), [job for job, _, _ in rows]
                self.in_flight.append((plan, jobs, self.executor.execute_model(plan, non_block=True)))
            self.commit()

    def choose(self) -> list[tuple[Job, int, bool]]:
        """(job, tokens, is new in its slot) of the next step."""
        for job in [job for job in self.running if job.is_planned and job.num_computed >= job.num_planned - 1]:
            self.release(job)
        if self.running and self.rng.random() < 0.1:
            job = self.rng.choice(self.running)
            self.release(job)
            self.waiting.append(job)
            self.num_preemptions += 1
        rows = [
            (job, self.count(job), False)
            for job in self.running
            if self.rng.random() < 0.9 and job.num_computed < job.num_planned
        ]
        while self.waiting and self.free_slots and self.rng.random() < 0.8:
            job = self.waiting.popleft()
            if job.num_in_flight:  # preempted: its tokens are still on their way
                self.waiting.append(job)
                break
            job.slot, job.num_computed, job.num_planned = self.free_slots.pop(), 0, len(job.tokens)
            self.running.append(job)
            rows.append((job, self.count(job), True))
        return rows

    def count(self, job: Job) -> int:
        return min(job.num_planned - job.num_computed, self.rng.randint(1, self.max_chunk))

    def release(self, job: Job) -> None:
        self.running.remove(job)
        self.free_slots.append(job.slot)
        self.free_blocks += [block for blocks in job.blocks for block in blocks]
        job.blocks = []

    def plan(self, step_id: int, rows: list[tuple[Job, int, bool]]) -> SchedulerOutput:
        new, deltas = [], []
        computed = ints([job.num_computed for job, _, _ in rows])
        samples = []
        for job, count, is_new in rows:
            job.num_computed += count
            samples.append(job.num_computed == job.num_planned)
            while len(job.blocks) * self.block_size < job.num_computed:
                blocks = tuple(self.free_blocks.pop(0) for _ in range(self.num_groups))
                if not is_new:
                    deltas.append((job.slot, len(job.blocks), *blocks))
                job.blocks.append(blocks)
            if is_new:
                new.append(
                    NewRequestData(
                        request_id=job.name,
                        slot=job.slot,
                        token_ids=ints(job.tokens),
                        num_prompt_tokens=len(job.prompt),
                        block_ids=tuple(ints(list(ids)) for ids in zip(*job.blocks, strict=True)),
                        sampling=job.sampling,
                    )
                )
            job.num_planned += samples[-1]
            job.num_in_flight += 1
        slots, columns, *ids = (ints([delta[i] for delta in deltas]) for i in range(2 + self.num_groups))
        return SchedulerOutput(
            step_id=step_id,
            new_requests=tuple(new),
            request_ids=tuple(job.name for job, _, _ in rows),
            slots=ints([job.slot for job, _, _ in rows]),
            num_computed_tokens=computed,
            num_scheduled_tokens=ints([count for _, count, _ in rows]),
            samples=np.array(samples),
            block_table_deltas=tuple(
                BlockTableDelta(slots=slots, columns=columns, block_ids=group_ids) for group_ids in ids
            ),
        )

    def commit(self) -> None:
        if not self.in_flight:
            return
        plan, jobs, future = self.in_flight.popleft()
        tokens = iter(future.result(timeout=60).sampled_token_ids.tolist())
        for job, samples in zip(jobs, plan.samples.tolist(), strict=True):
            job.num_in_flight -= 1
            if samples:
                job.tokens.append(next(tokens))
