"""`PlanAhead`: drives an executor with plans made several steps ahead of their results, slots and blocks reused at once.

It decides by random numbers what a scheduler would decide by policy: who is computed, in which chunks, who is preempted. A
request that is planned to its end leaves its slot and blocks to the next one while its own last steps are still under way; a
preempted one waits until its steps have ended, and comes back with all its tokens.

Some requests are under a grammar (`admits`, `forced_token`): masks are sent when the tokens before them are known, in any order
and as late as may be; tokens that it forces supersede what steps under way draw for the request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight.executor.executor import Executor
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import (
    BlockTableDelta,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenDelta,
)


def admits(position: int, last: int, token: int | np.ndarray) -> Any:  # Any: a bool, or an array of them
    """The grammar: whether `token` may stand at `position`, behind `last`."""
    return (token * 31 + position + last) % 3 > 0


def forced_token(position: int, last: int) -> int | None:
    """The one token that the grammar admits, where it admits no other."""
    return (3 * last + position) % 97 if (5 * last + position) % 4 == 0 else None


def mask(position: int, last: int, num_tokens: int) -> np.ndarray:
    words = -(-num_tokens // 32)
    admitted = np.zeros(32 * words, dtype=bool)
    admitted[:num_tokens] = admits(position, last, np.arange(num_tokens))
    return np.packbits(admitted, bitorder="little").view(np.int32)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass(eq=False)
class Job:
    """One request. `tokens` are known; `num_planned` counts those that steps under way will draw, too. What rows of an
    older `generation` draw is superseded."""

    name: str
    prompt: list[int]
    sampling: ResolvedSampling
    tokens: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    slot: int = -1
    blocks: list[tuple[int, ...]] = field(default_factory=list)  # one id per KV group
    has_grammar: bool = False
    generation: int = 0
    forced: list[int] = field(default_factory=list)  # positions of tokens that no plan has told

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_planned = len(self.prompt)

    @property
    def end(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def is_planned(self) -> bool:
        """To its end. Under a grammar nobody knows before the tokens are known."""
        if self.has_grammar:
            return len(self.tokens) == self.end
        return self.num_planned == self.end and self.num_computed >= self.end - 1


@dataclass
class Step:
    plan: SchedulerOutput
    jobs: list[Job]
    generations: list[int]
    future: Future[ModelRunnerOutput]
    awaits_masks: bool


class PlanAhead:
    """
    Args:
        depth: steps under way at most.
        step_ids: where the last drive of the executor left off.
        max_chunk: tokens of a prompt in one step.
        forces: tell workers of forced tokens as such; else their request comes back with them as a new one.
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
        vocab_size: int,
        forces: bool = True,
    ) -> None:
        self.executor, self.depth, self.block_size, self.num_groups = executor, depth, block_size, num_groups
        self.step_ids, self.max_chunk = step_ids, max_chunk
        self.vocab_size, self.forces = vocab_size, forces
        self.preemption_rate = 0.1
        self.rng = random.Random(seed)
        self.waiting = deque(jobs)
        self.running: list[Job] = []
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(1, num_blocks))
        self.num_preemptions = self.num_forced = self.num_superseded = self.num_late_masks = 0
        self.in_flight: deque[Step] = deque()

    def run(self) -> None:
        while self.waiting or self.running or self.in_flight:
            while len(self.in_flight) < self.depth and (rows := self.choose()):
                self.submit(rows)
            self.commit()

    def submit(self, rows: list[tuple[Job, int, bool]]) -> Step:
        plan, jobs = self.plan(next(self.step_ids), rows), [job for job, _, _ in rows]
        future = self.executor.execute_model(plan, non_block=True)
        self.in_flight.append(
            Step(plan, jobs, [job.generation for job in jobs], future, awaits_masks=len(plan.grammar_rows) > 0)
        )
        return self.in_flight[-1]

    def send_masks(self) -> None:
        """Those of the oldest step, and some of the others that can be sent."""
        steps = [step for step in self.in_flight if step.awaits_masks]
        for step in self.rng.sample(steps, len(steps)):
            if step is self.in_flight[0] or (self.rng.random() < 0.5 and self.masks_are_known(step)):
                self.num_late_masks += step is not self.in_flight[-1]
                step.awaits_masks = False
                self.executor.provide_grammar_output(step.plan.step_id, self.masks(step))

    def masks_are_known(self, step: Step) -> bool:
        return all(self.tokens_before(step, row) is not None for row in step.plan.grammar_rows.tolist())

    def tokens_before(self, step: Step, row: int) -> list[int] | None:
        """The tokens before the row's draw; none if it is superseded; None if they are not known yet."""
        job = step.jobs[row]
        if step.generations[row] != job.generation:
            return []
        position = int(step.plan.num_computed_tokens[row] + step.plan.num_scheduled_tokens[row])
        return job.tokens[:position] if len(job.tokens) >= position else None

    def masks(self, step: Step) -> GrammarOutput:
        rows, masks = step.plan.grammar_rows, []
        for row in rows.tolist():
            before = self.tokens_before(step, row)
            assert before is not None
            everything = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
            masks.append(mask(len(before), before[-1], self.vocab_size) if before else everything)
        return GrammarOutput(rows=rows, num_masks=np.ones_like(rows), masks=np.array(masks))

    def choose(self) -> list[tuple[Job, int, bool]]:
        """(job, tokens, is new in its slot) of the next step."""
        for job in [job for job in self.running if job.is_planned]:
            self.release(job)
        if self.running and self.rng.random() < self.preemption_rate:
            job = self.rng.choice(self.running)
            self.release(job)
            self.waiting.append(job)
            self.num_preemptions += 1
        rows = [
            (job, self.count(job), False)
            for job in self.running
            if self.rng.random() < 0.9 and job.num_computed < job.num_planned and job.num_computed < job.end - 1
        ]
        while self.waiting and self.free_slots and self.rng.random() < 0.8:
            job = self.waiting.popleft()
            if job.num_in_flight:  # preempted: its tokens are still on their way
                self.waiting.append(job)
                break
            if job.is_planned:
                continue
            job.slot, job.num_computed, job.num_planned = self.free_slots.pop(), 0, len(job.tokens)
            job.forced = []
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
        new, deltas, forced = [], [], []
        computed = ints([job.num_computed for job, _, _ in rows])
        samples = []
        for job, count, is_new in rows:
            forced += [(job.slot, position, job.tokens[position]) for position in job.forced]
            job.forced = []
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
            grammar_rows=ints([i for i, (job, _, _) in enumerate(rows) if samples[i] and job.has_grammar]),
            forced_tokens=TokenDelta(
                slots=ints([slot for slot, _, _ in forced]),
                positions=ints([position for _, position, _ in forced]),
                token_ids=ints([token for _, _, token in forced]),
            )
            if forced
            else None,
            block_table_deltas=tuple(
                BlockTableDelta(slots=slots, columns=columns, block_ids=group_ids) for group_ids in ids
            ),
        )

    def commit(self) -> None:
        if not self.in_flight:
            return
        self.send_masks()
        step = self.in_flight.popleft()
        tokens = iter(step.future.result(timeout=60).sampled_token_ids.tolist())
        for job, generation, samples in zip(step.jobs, step.generations, step.plan.samples.tolist(), strict=True):
            job.num_in_flight -= 1
            if samples:
                token = next(tokens)
                if generation == job.generation:
                    self.append(job, token)
                self.num_superseded += generation != job.generation
        assert next(tokens, None) is None

    def append(self, job: Job, token: int) -> None:
        position = len(job.tokens)
        if job.has_grammar:
            assert admits(position, job.tokens[-1], token)
        job.tokens.append(token)
        while job.has_grammar and len(job.tokens) < job.end:
            forced = forced_token(len(job.tokens), job.tokens[-1])
            if forced is None:
                break
            job.forced.append(len(job.tokens))
            job.tokens.append(forced)
        if not job.forced or len(job.tokens) == position + 1:
            return
        self.num_forced += len(job.tokens) - position - 1
        job.generation += 1
        job.num_planned, job.num_computed = len(job.tokens), min(job.num_computed, position + 1)
        if not self.forces and job in self.running:
            self.release(job)
            self.waiting.append(job)
