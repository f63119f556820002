"""`PlanAhead`: drives an executor with plans made several steps ahead of their results, slots and blocks reused at once.

It decides by random numbers what a scheduler would decide by policy: who is computed, in which chunks, who is preempted. A
request that is planned to its end leaves its slot and blocks to the next one while its own last steps are still under way; a
preempted one waits until its steps have ended, and comes back with all its tokens.

Some requests are under a grammar (`admits`, `forced_token`): masks are sent when the tokens before them are known, in any order
and as late as may be; tokens that it forces supersede what steps under way draw for the request.

With drafts a row that begins at a drawn token may have some, and must have where nobody knows how many tokens the steps under
way will emit: `num_planned` and `num_computed` are upper bounds then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from inflight.executor.executor import Executor
from inflight.interface.prompt_logprobs import PromptLogprobsResult
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import BlockTableDelta, GrammarOutput, ModelRunnerOutput, SchedulerOutput, TokenDelta
from tests.support.plans import new_request, step_plan
from tests.support.request_parts import asked_parts


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
    """One request. `tokens` are known; `num_planned` counts those that steps under way will emit at most (`emitting`), too.
    What rows of an older `generation` draw is superseded."""

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
    emitting: list[int] = field(default_factory=list)  # the most that each step under way emits
    is_drawn: bool = False  # its last token, rather than told by a plan
    num_drafts: int = 0  # that were proposed in its last step that has ended
    drafts: list[int] = field(default_factory=list)  # the same, behind the last of `tokens`
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_planned = len(self.prompt)

    @property
    def end(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def is_planned(self) -> bool:
        """To its end. Under a grammar, and with drafts, nobody knows before the tokens are known."""
        if self.has_grammar or any(most > 1 for most in self.emitting):
            return len(self.tokens) == self.end
        return self.num_planned == self.end and self.num_computed >= self.end - 1


class Row(NamedTuple):
    job: Job
    count: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    is_new: bool
    max_drafts: int = -1


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
        max_drafts: int = 0,
    ) -> None:
        self.executor, self.depth, self.block_size, self.num_groups = executor, depth, block_size, num_groups
        self.step_ids, self.max_chunk = step_ids, max_chunk
        self.vocab_size, self.forces, self.max_drafts = vocab_size, forces, max_drafts
        self.preemption_rate = 0.1
        self.rng = random.Random(seed)
        self.waiting = deque(jobs)
        self.running: list[Job] = []
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(1, num_blocks))
        self.num_preemptions = self.num_forced = self.num_superseded = self.num_late_masks = 0
        self.num_accepted = self.num_rejected = 0
        self.in_flight: deque[Step] = deque()

    def run(self) -> None:
        while self.waiting or self.running or self.in_flight:
            while len(self.in_flight) < self.depth and (rows := self.choose()):
                self.submit(rows)
            self.commit()

    def submit(self, rows: list[Row]) -> Step:
        plan, jobs = self.plan(next(self.step_ids), rows), [row.job for row in rows]
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
        """Whether the tokens and drafts before each row under a grammar are: no older step under way has its request."""
        older = {job.name for other in self.in_flight if other.plan.step_id < step.plan.step_id for job in other.jobs}
        return all(step.jobs[row].name not in older for row in step.plan.grammar_rows.tolist())

    def masks(self, step: Step) -> GrammarOutput:
        plan, num_masks, masks = step.plan, [], []
        for row in plan.grammar_rows.tolist():
            job, is_valid = step.jobs[row], step.generations[row] == step.jobs[row].generation
            most = max(int(plan.max_draft_tokens[row]), 0) if len(plan.max_draft_tokens) else 0
            num_masks.append(1 + min(most, job.num_drafts))
            tokens = job.tokens + job.drafts[: num_masks[-1] - 1]
            for length in range(len(job.tokens), len(job.tokens) + num_masks[-1]):
                everything = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
                masks.append(mask(length, tokens[length - 1], self.vocab_size) if is_valid else everything)
        return GrammarOutput(rows=plan.grammar_rows, num_masks=ints(num_masks), masks=np.array(masks))

    def choose(self) -> list[Row]:
        for job in [job for job in self.running if job.is_planned]:
            self.release(job)
        if self.running and self.rng.random() < self.preemption_rate:
            job = self.rng.choice(self.running)
            self.release(job)
            self.waiting.append(job)
            self.num_preemptions += 1
        rows = [
            self.row(job)
            for job in self.running
            if self.rng.random() < 0.9 and job.num_computed < min(job.num_planned, job.end - 1)
        ]
        while self.waiting and self.free_slots and self.rng.random() < 0.8:
            job = self.waiting.popleft()
            if job.num_in_flight:  # preempted: its tokens are still on their way
                self.waiting.append(job)
                break
            if job.is_planned:
                continue
            job.slot, job.num_computed, job.num_planned = self.free_slots.pop(), 0, len(job.tokens)
            job.forced, job.is_drawn, job.num_drafts, job.drafts = [], False, 0, []
            self.running.append(job)
            rows.append(Row(job, self.count(job), True))
        return rows

    def row(self, job: Job) -> Row:
        is_certain = all(most == 1 for most in job.emitting)
        if self.max_drafts and job.is_drawn and (not is_certain or self.rng.random() < 0.7):
            most = min(self.rng.randint(0, self.max_drafts), job.end - job.num_planned - 1)
            return Row(job, 1 + most, False, most)
        return Row(job, self.count(job), False)

    def count(self, job: Job) -> int:
        return min(job.num_planned - job.num_computed, self.rng.randint(1, self.max_chunk))

    def release(self, job: Job) -> None:
        self.running.remove(job)
        self.free_slots.append(job.slot)
        self.free_blocks += [block for blocks in job.blocks for block in blocks]
        job.blocks = []

    def plan(self, step_id: int, rows: list[Row]) -> SchedulerOutput:
        new, deltas, forced = [], [], []
        computed = ints([row.job.num_computed for row in rows])
        samples = []
        for job, count, is_new, max_drafts in rows:
            told = range(job.num_computed, len(job.tokens)) if job.forced else ()
            forced += [(job.slot, position, job.tokens[position]) for position in told]
            job.forced = []
            job.num_computed += count
            samples.append(max_drafts >= 0 or job.num_computed == job.num_planned)
            while len(job.blocks) * self.block_size < job.num_computed:
                blocks = tuple(self.free_blocks.pop(0) for _ in range(self.num_groups))
                if not is_new:
                    deltas.append((job.slot, len(job.blocks), *blocks))
                job.blocks.append(blocks)
            if is_new:
                new.append(
                    new_request(
                        job.slot,
                        job.tokens,
                        *zip(*job.blocks, strict=True),
                        request_id=job.name,
                        num_prompt_tokens=len(job.prompt),
                        sampling=job.sampling,
                        parts=asked_parts(job.sampling.params),
                    )
                )
            if samples[-1]:
                job.emitting.append(max(max_drafts, 0) + 1)
                job.is_drawn, job.num_planned = True, len(job.tokens) + sum(job.emitting)
                job.num_computed = job.num_planned - 1
            job.num_in_flight += 1
        slots, columns, *ids = (ints([delta[i] for delta in deltas]) for i in range(2 + self.num_groups))
        return step_plan(
            [row.job.slot for row in rows],
            computed,
            [row.count for row in rows],
            samples,
            step_id=step_id,
            new_requests=tuple(new),
            request_ids=tuple(row.job.name for row in rows),
            max_draft_tokens=ints([row.max_drafts for row in rows] if max(row.max_drafts for row in rows) >= 0 else []),
            grammar_rows=ints([i for i, row in enumerate(rows) if samples[i] and row.job.has_grammar]),
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
        output = step.future.result(timeout=300)
        if not len(output.num_sampled_tokens):
            output = replace(
                output,
                num_sampled_tokens=np.ones(len(output.sampled_token_ids), dtype=np.int32),
                sampled_positions=(step.plan.num_computed_tokens + step.plan.num_scheduled_tokens)[step.plan.samples],
            )
        ends = output.num_sampled_tokens.cumsum()
        assert len(ends) == sum(step.plan.samples)
        assert ends.max(initial=0) == len(output.sampled_token_ids)
        logprobs = self.logprobs_by_token(output)
        self.take_prompt_logprobs(step, output)
        for row, (job, generation) in enumerate(zip(step.jobs, step.generations, strict=True)):
            job.num_in_flight -= 1
            if not step.plan.samples[row]:
                continue
            index = int(step.plan.samples[:row].sum())
            drafts = output.draft_token_ids[index].tolist() if self.max_drafts else []
            job.num_drafts = sum(token >= 0 for token in drafts)
            self.num_superseded += generation != job.generation
            if generation == job.generation:
                start, end = int(ends[index] - output.num_sampled_tokens[index]), int(ends[index])
                assert output.sampled_positions[index] == len(job.tokens)
                self.emit(job, output.sampled_token_ids[start:end].tolist(), logprobs[start:end])
                job.drafts = drafts[: job.num_drafts]

    def logprobs_by_token(self, output: ModelRunnerOutput) -> list[float | None]:
        found: list[float | None] = [None] * len(output.sampled_token_ids)
        for i, row in enumerate(output.logprobs_rows.tolist()):
            assert output.logprobs is not None
            assert output.logprobs.token_ids[i, 0] == output.sampled_token_ids[row]
            found[row] = float(output.logprobs.logprobs[i, 0])
        return found

    def take_prompt_logprobs(self, step: Step, output: ModelRunnerOutput) -> None:
        for row, piece in output.parts:
            assert isinstance(piece, PromptLogprobsResult)
            job, tokens = step.jobs[row], piece.columns.token_ids[:, 0].tolist()
            assert tokens == job.prompt[piece.start : piece.start + len(tokens)]
            for position, logprob in enumerate(piece.columns.logprobs[:, 0].tolist(), piece.start):
                job.prompt_logprobs[position] = logprob

    def emit(self, job: Job, tokens: list[int], logprobs: list[float | None]) -> None:
        """Up to a token behind which another one is forced: what was drawn behind it is superseded."""
        self.num_accepted += len(tokens) - 1
        self.num_rejected += job.emitting.pop(0) - len(tokens)
        job.num_planned = len(job.tokens) + len(tokens) + sum(job.emitting)
        job.num_computed = job.num_planned - 1
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            position = len(job.tokens)
            if job.has_grammar:
                assert admits(position, job.tokens[-1], token)
            assert (logprob is not None) == (job.sampling.params.logprobs is not None)
            job.logprobs += [logprob] if logprob is not None else []
            job.tokens.append(token)
            if job.has_grammar and self.force(job):
                is_computed = job.emitting or i + 1 < len(tokens)
                job.emitting, job.is_drawn = [], False
                job.num_planned, job.num_computed = len(job.tokens), position + bool(is_computed)
                if not self.forces and job in self.running:
                    self.release(job)
                    self.waiting.append(job)
                return

    def force(self, job: Job) -> bool:
        """Append what the grammar forces; what steps under way draw for the job is superseded then."""
        before = len(job.tokens)
        while len(job.tokens) < job.end and (forced := forced_token(len(job.tokens), job.tokens[-1])) is not None:
            job.forced.append(len(job.tokens))
            job.tokens.append(forced)
        self.num_forced += len(job.tokens) - before
        job.generation += len(job.tokens) > before
        return len(job.tokens) > before
