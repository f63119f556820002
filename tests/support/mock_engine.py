"""The real `EngineCore` over mock workers that run a step no earlier than somebody waits for it.

So the engine plans ahead as far as it may, and every step sees the plans of those before it in full. What comes out is checked
as it comes: a token that differs from `mock_generate`, comes twice or too late is an assertion at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from inflight.config.engine import ParallelConfig, SchedulerConfig
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.config.speculative import resolve_speculative
from inflight.engine.core.step_loop import CoreListener
from inflight.engine.start.kv_cache_sizing import blocks_per_sequence, make_groups
from inflight.engine.start.make_core import make_core
from inflight.errors import ErrorKind, RankError, StepError
from inflight.executor.meeting import Meeting
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.prompt_logprobs import PromptLogprobsResult
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason, ResolvedSampling
from inflight.interface.start_up import BeginEpoch, EpochCommand, Listening
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.processes.recovery_limits import RecoveryLimits
from inflight.sampling_params import SamplingParams
from inflight.scheduler.step_time.model import StepTimeModel
from inflight.structured_output.manager import StructuredOutputManager
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.conformance.configs import engine_config
from tests.support.erratic_times import limit_times
from tests.support.mock_transfers import MockTransfers
from tests.support.mock_worker import MockWorker, mock_generate
from tests.support.request_parts import asked_parts
from tests.support.toy_grammar import ToyBackend

VOCAB_SIZE = 50
MAX_MODEL_LEN = 64


class LateFuture(Future[ModelRunnerOutput]):
    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        while not self.done():
            assert self._executor.run_next(), "the oldest step waits for masks, and the engine waits for it"
        return super().result(timeout)


class LateExecutor:
    """What `EngineCore` asks of an executor, in its own thread. Steps run in the order in which they were submitted."""

    def __init__(self, worker: MockWorker, on_plan: Callable[[SchedulerOutput], None]) -> None:
        self.worker, self.on_plan = worker, on_plan
        self.plans: list[SchedulerOutput] = []  # all submitted
        self.failing: dict[int, bool] = {}  # step id -> whether it runs to its end and only its answer is lost
        self._queue: deque[tuple[SchedulerOutput, LateFuture]] = deque()
        self.recoveries: list[RankError] = []
        self.replaced: tuple[int, ...] = ()  # ranks that each recovery replaces
        self.new_worker: Callable[[], MockWorker] = lambda: worker
        self.transfers: MockTransfers | None = None
        self.meeting, self.starting = Meeting(0, 1), set[int]()
        self.limits = RecoveryLimits(FaultToleranceConfig(max_recoveries=10**9))
        self.on_death: Callable[[], None] | None = None

    @property
    def newest(self) -> LateFuture | None:
        """The newest step that has not run."""
        return self._queue[-1][1] if self._queue else None

    @property
    def next_step_id(self) -> int:
        return self.plans[-1].step_id + 1 if self.plans else 0

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.worker.get_kv_cache_specs()]

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        self.worker.initialize_from_config(kv_cache_configs[0])

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        self.worker.provide_grammar_output(step_id, grammar_output)

    def execute_model(self, plan: SchedulerOutput, non_block: bool, *, budget: float) -> LateFuture:
        assert non_block
        self.on_plan(plan)
        self.plans.append(plan)
        future = LateFuture(self)
        self._queue.append((plan, future))
        return future

    def collective_rpc(
        self,
        method: str,
        args: Any,
        kwargs: Any = None,
        timeout: float | None = None,
        *,
        non_block: bool = False,
        beside: bool = False,
    ) -> Any:
        """It would run behind all steps submitted: none may be left. A call beside the steps is one of a transfer."""
        if beside:
            assert non_block and method.startswith("kv_") and self.transfers is not None
            return self.transfers.call(self, method.removeprefix("kv_"), *args)
        assert not self._queue and timeout is None
        return [(method, args, kwargs)]

    def set_death_callback(self, on_death: Callable[[], None]) -> None:
        self.on_death = on_death

    def check_health(self) -> None:
        while self.run_next():  # a call runs behind all steps submitted, those that are void, too
            pass

    # what a recovery needs: the rank reports at once, also a new one
    can_recover = True
    world_size, local_ranks, longest_budget = 1, range(1), 0.0
    num_stale_frames = num_spares = 0

    def root_cause(self, error: RankError) -> RankError:
        return error

    def begin_epoch(self, cause: RankError) -> set[int]:
        self.recoveries.append(cause)
        self._queue.clear()
        if self.transfers is not None:
            self.transfers.begin_epoch(cause, loses_host_pool=bool(self.replaced))
        self.meeting = Meeting(self.meeting.epoch + 1, self.world_size)
        return set(self.replaced)

    def send(self, rank: int, command: EpochCommand) -> None:
        assert command == BeginEpoch(epoch=self.meeting.epoch)
        self.meeting.take(Listening(rank=rank, epoch=command.epoch, address=("", 0), num_dropped=0))

    def replace_rank(self, rank: int) -> None:
        self.worker = self.new_worker()

    def join_epoch(self, deadline: float | None = None) -> None:
        pass

    def run_next(self) -> bool:
        """Run the oldest step, if there is one and its masks have come."""
        if not self._queue or (len(self._queue[0][0].grammar_rows) and not self.worker.has_masks(self._queue[0][0])):
            return False
        plan, future = self._queue.popleft()
        try:
            if self.failing.get(plan.step_id) is False:
                self.worker.apply(plan)
                raise StepError("injected", rank=0, step_id=plan.step_id)
            output = self.worker.execute_model(plan)
            if plan.step_id in self.failing:
                raise StepError("injected", rank=0, step_id=plan.step_id)
        except Exception as error:  # a step after the one that failed may well be an assertion of the mock worker
            future.set_exception(error)
        else:
            future.set_result(output)
        return True


@dataclass
class Wanted:
    """A request, and what it must give."""

    prompt: list[int]
    limit: int  # tokens, prompt and output together
    tokens: list[int]
    logprobs: bool
    has_grammar: bool
    planned_at: int = -1  # the last step with a row of it
    drawn_at: int = -1  # the last step that was planned to draw a token


@dataclass
class MockEngine:
    """Attributes: `outputs`, `finished`, `order`: what has come out. `core`, `scheduler`, `executor`, `worker`: the parts."""

    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    extra_blocks: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    chunked: bool = True
    caching: bool = True
    policy: str = "fcfs"
    depth: int = 1
    stagger: int = 1
    num_speculative_tokens: int = 0
    fault_tolerance: bool = False
    transfer: KVTransferConfig | None = None
    transfers: MockTransfers | None = None
    listener: CoreListener = field(default_factory=CoreListener)
    parallel: ParallelConfig | None = None
    make_executor: Callable[[MockWorker, Callable[[SchedulerOutput], None]], LateExecutor] = LateExecutor
    wanted: dict[str, Wanted] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)  # as the last output of a request says
    order: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.worker = self._new_worker()
        self.executor = self.make_executor(self.worker, self._check_plan)
        self.executor.transfers = self.transfers
        groups = make_groups([self.worker.get_kv_cache_specs()])[0]
        least = blocks_per_sequence(groups, num_tokens=MAX_MODEL_LEN, max_step_tokens=self.max_num_batched_tokens)
        block_bytes = max(len(group.layer_names) * group.spec.block_bytes for group in groups)
        config = engine_config()
        config = replace(
            config,
            model=replace(config.model, max_model_len=MAX_MODEL_LEN),
            cache=replace(
                config.cache,
                enable_prefix_caching=self.caching,
                memory_bytes=(1 + least + self.extra_blocks) * block_bytes,
                transfer=self.transfer and replace(self.transfer, cpu_bytes=self.transfer.cpu_bytes * block_bytes),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                enable_chunked_prefill=self.chunked,
                policy=self.policy,
                depth=self.depth,
                stagger=self.stagger,
            ),
        )
        config = replace(config, fault_tolerance=FaultToleranceConfig(enabled=self.fault_tolerance))
        config = replace(config, parallel=self.parallel or config.parallel)
        if self.num_speculative_tokens:
            speculative = {"method": "ngram", "num_speculative_tokens": self.num_speculative_tokens}
            config = replace(config, speculative=resolve_speculative(speculative))
        self.grammars = StructuredOutputManager(
            lambda: ToyBackend(VOCAB_SIZE),
            VOCAB_SIZE,
            num_buffers=2 * self.depth,
            num_threads=1,
            is_paced=False,  # the time that a busy machine needs would change the plans
        )
        self.core = make_core(config, self.executor, self.grammars, self.listener)  # type: ignore[arg-type]
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler._kv_cache.pool

    def _new_worker(self) -> MockWorker:
        return MockWorker(
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            windows=list(self.windows),
            num_speculative_tokens=self.num_speculative_tokens,
        )

    def lose_arenas(self) -> None:
        """From now on each recovery replaces the rank, so that its blocks are empty."""

        def new_worker() -> MockWorker:
            self.worker = self._new_worker()
            self.worker.initialize_from_config(self.core.kv_cache_config)
            return self.worker

        self.executor.replaced, self.executor.new_worker = (0,), new_worker

    def limit_times(self, times: StepTimeModel, **limits: Any) -> None:
        limit_times(self.scheduler, self.block_size, times, **limits)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        stop: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        priority: int = 0,
        salt: str = "",
        leader: str | None = None,
        prompt_logprobs: bool = False,
        grammar: str | None = None,
        num_losses: int = 0,
    ) -> None:
        """`max_tokens` 0: nothing is drawn, as for vectors. `grammar`: the regular expression for `ToyBackend`."""
        limit = min(len(prompt) + max_tokens, MAX_MODEL_LEN)
        seed = int(grammar) if grammar is not None and grammar != "bad" else None
        tokens = mock_generate(prompt, limit - len(prompt), VOCAB_SIZE, stop, seed) if grammar != "bad" else []
        self.wanted[request_id] = Wanted(prompt, limit, tokens, prompt_logprobs, grammar is not None)
        self.outputs[request_id], self.prompt_logprobs[request_id] = [], []
        params = SamplingParams(
            max_tokens=max(max_tokens, 1),
            min_tokens=min_tokens,
            prompt_logprobs=0 if prompt_logprobs else None,
            structured_outputs=None if grammar is None else StructuredOutputsParams(regex=grammar),
        )
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                sampling=ResolvedSampling(params=params, seed=0, max_tokens=max_tokens, stop_token_ids=stop),
                priority=priority,
                cache_salt=salt,
                prompt_leader=leader,
                num_losses=num_losses,
                parts=asked_parts(params),
            ),
            np.array(prompt, dtype=np.int32),
        )

    def step(self) -> list[EngineCoreOutput]:
        """Step the core, and check what it planned and returned.

        Raises:
            StepError: the step was to fail.
        """
        if self.transfers is not None:
            self.transfers.advance(is_needed=self.scheduler.transfers.is_running and not self.core._in_flight)
        try:
            outputs = self.core.step()
        finally:
            self.scheduler.check_integrity()
        for output in outputs:
            wanted, got = self.wanted[output.request_id], self.outputs[output.request_id]
            assert output.request_id not in self.finished
            self.cached_tokens[output.request_id] = output.num_cached_tokens
            got.extend(output.new_token_ids)
            assert got == wanted.tokens[: len(got)], output.request_id
            for part in output.parts:
                assert isinstance(part, PromptLogprobsResult)
                self.prompt_logprobs[output.request_id].extend(part.columns.token_ids[:, 0].tolist())
            if output.error_kind is not ErrorKind.REQUEST:
                self.finished[output.request_id] = FinishReason.ERROR
            elif output.finish_reason is not None:
                assert got == wanted.tokens or output.finish_reason is FinishReason.ERROR, output.request_id
                if output.finish_reason is FinishReason.ERROR and wanted.has_grammar:
                    assert got == wanted.tokens  # up to the dead end
                    wanted.logprobs, self.prompt_logprobs[output.request_id] = False, []
                assert self.prompt_logprobs[output.request_id] == (wanted.prompt[1:] if wanted.logprobs else [])
                self.finished[output.request_id] = output.finish_reason
                self.order.append(output.request_id)
        return outputs

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id, "unknown"])
        self.scheduler.check_integrity()
        self.aborted.add(request_id)

    def run(self) -> None:
        """Step until all has ended. Whatever was not aborted has come out in full. The grammars are closed then."""
        for _ in range(10_000):
            if not self.core.has_unfinished_requests():
                break
            self.step()
        self.grammars.close()
        assert not self.core.has_unfinished_requests()
        assert set(self.wanted) == set(self.finished) | self.aborted
        if self.transfers is not None:
            while self.scheduler.transfers.is_running:
                self.transfers.finish()
                self.scheduler.transfers.settle()
            self.scheduler.transfers.check_integrity()
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1
        assert not self.grammars._grammars

    def _check_plan(self, plan: SchedulerOutput) -> None:
        in_flight = self.core._in_flight
        oldest_in_flight = in_flight[0][0].step_id if in_flight else plan.step_id
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        assert set(Counter(plan.request_ids).values()) == {1}
        for data in plan.new_requests:  # none is resumed before its steps in flight have been committed
            assert self.wanted[data.request_id].planned_at < oldest_in_flight
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        for request_id, end, samples in zip(plan.request_ids, ends, plan.samples.tolist(), strict=True):
            wanted = self.wanted[request_id]
            is_only_prompt = wanted.limit == len(wanted.prompt)
            assert end < wanted.limit + is_only_prompt, f"{request_id}: planned past its end"
            if not wanted.has_grammar:  # a forced token is known at once
                assert wanted.drawn_at < oldest_in_flight or plan.step_id - wanted.drawn_at >= self.stagger
            wanted.planned_at = plan.step_id
            if samples:
                wanted.drawn_at = plan.step_id
