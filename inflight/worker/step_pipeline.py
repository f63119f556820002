"""`StepPipeline`: the steps of one rank. The phases of different steps overlap.

A step is prepared in the thread of the executor, which calls `execute_model`, and computed in the device's compute thread:

    calling thread   | prepare N | prepare N+1 |              | prepare N+2 |
    compute thread               | receive N, forward N, send N | sample N | receive N+1, forward N+1, ...
    drain thread                                                           | drain N |

So the next step is prepared before the previous step ends. Of these three threads, only the compute thread waits for other
ranks. `PhaseOrder` decides whether a forward or a sample runs next. The drain thread copies the drawn tokens to the host and
completes the step's future.
"""

import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.world import World
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import WorkerBase
from inflight.timeline import Timeline
from inflight.worker.core_sharing import CoreWatch
from inflight.worker.phase_order import PhaseOrder, StepPhases
from inflight.worker.pipeline import Pipeline
from inflight.worker.runner import AnyRunner, PreparedStep


@dataclass(slots=True)
class _Step:
    """A step under way. `before` is the future of the previous step; None if that step had ended when this one was prepared."""

    model_input: PreparedStep
    before: Future[ModelRunnerOutput] | None
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    forward: object = None  # what the runner's forward has returned
    started_at: float = 0.0  # when its forward began, on the clock time.perf_counter()
    compute_seconds: float = 0.0  # the time of its forward and its sample so far; on a GPU, the time of their launch
    error: BaseException | None = None


class StepPipeline(WorkerBase):
    """The part of a worker that each step uses.

    A concrete worker sets `_core_watch`, `_world`, `_pipeline` and `_runner`.
    """

    _core_watch: CoreWatch | None
    _world: World
    _pipeline: Pipeline

    def __init__(self, config: EngineConfig, rank: int, device: Device) -> None:
        self._config = config
        self.rank = rank
        self._timeline = Timeline()
        self._device = device
        self._stage = pipeline_stage(config.parallel.pipeline_layer_partition, config.parallel.layout.pp_rank(rank))
        self._runner: AnyRunner | None = None
        # both are about the time since the ranks last connected, which was at the start or after a fault:
        self._has_left = False  # whether this rank has left its groups and links
        self._failed_step: int | None = None  # the first step that failed; later steps do not run
        self._last_end = 0.0  # when the last step ended on a GPU, on the clock time.perf_counter()
        self._order = PhaseOrder(self._device.submit)
        self._inference = torch.inference_mode()  # of the compute thread
        # the futures of the steps under way and of some older ones, in order
        self._futures: deque[Future[ModelRunnerOutput]] = deque()

    @property
    def runner(self) -> AnyRunner:
        assert self._runner is not None, "call load_model first"
        return self._runner

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._raise_if_failed(scheduler_output.step_id)
        try:
            model_input = self.runner.prepare_inputs(scheduler_output)
        except BaseException:
            self._record_failed(scheduler_output.step_id)
            raise
        if not self._stage.is_first:
            assert self._pipeline.link is not None
            self._pipeline.link.post_receive(scheduler_output.step_id, scheduler_output.num_tokens)
        while self._futures and self._futures[0].done():
            self._futures.popleft()
        if not self._futures and self._core_watch is not None:
            self._core_watch.begin()
        # A draft model writes keys in `sample`, to blocks that a later plan may give to another request.
        is_in_turn = self._config.draft_model is not None
        step = _Step(model_input, before=self._futures[-1] if self._futures else None)
        self._futures.append(step.future)
        self._order.add(
            StepPhases(
                step_id=scheduler_output.step_id,
                drawn_in_step=scheduler_output.step_id - 1 if is_in_turn else model_input.inputs.drawn_in_step,
                awaits_masks=self._stage.is_last and len(scheduler_output.grammar_rows) > 0,
                forward=partial(self._forward, step),
                sample=partial(self._sample, step),
            )
        )
        return step.future

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        self._order.provide(step_id, grammar_output)

    def _record_failed(self, step_id: int) -> None:
        if self._failed_step is None or step_id < self._failed_step:
            self._failed_step = step_id

    def _raise_if_failed(self, step_id: int) -> None:
        """Raises if an earlier step has failed, or if the groups were left.

        A plan says only what has changed since the plan before it. A step that does not know what the failed plan has
        changed would write to KV blocks that belong to other requests now.
        """
        failed = self._failed_step
        if failed is not None and failed < step_id:
            raise ConnectionError(f"rank {self.rank} does not run step {step_id}, because step {failed} failed on it")
        if self._has_left and self._config.parallel.world_size > 1:
            raise ConnectionError(f"rank {self.rank} has stopped its communication")

    def _forward(self, step: _Step) -> None:
        """Run the step's forward, in the compute thread. An error is kept for `_sample`, because steps end in order."""
        step_id, link = step.model_input.plan.step_id, self._pipeline.link
        try:
            self._raise_if_failed(step_id)
            named = record_function(f"step {step_id}") if profiler._is_profiler_enabled else nullcontext()
            with self._inference, named:
                received = None if self._stage.is_first or link is None else link.receive(step_id)
                self.runner.receive_tokens(step.model_input)
                step.started_at = time.perf_counter()
                step.forward = self.runner.execute_model(step.model_input, received)
                step.compute_seconds = time.perf_counter() - step.started_at
                if isinstance(step.forward, IntermediateTensors):
                    assert link is not None
                    link.send(step_id, step.forward)
        except BaseException as error:  # also an interrupt: no caller of this thread would report it
            step.error = error
            self._record_failed(step_id)
            if step.before is not None and not step.before.done():
                # other ranks could wait in this forward for ever, and then the previous step would never be sampled
                self.leave_groups("a step failed on it")

    def _sample(self, step: _Step, grammar_output: GrammarOutput | None) -> None:
        """Run the step's sample, in the compute thread. The drain thread answers the step while the compute thread runs
        the next task."""
        drawn = None
        try:
            if step.error is None:
                start = time.perf_counter()
                with self._inference:
                    drawn = self.runner.sample(step.model_input, step.forward, grammar_output)
                step.compute_seconds += time.perf_counter() - start
        except BaseException as error:
            step.error = error
            self._record_failed(step.model_input.plan.step_id)
        if step.error is not None:
            self.runner.discard(step.model_input)
        try:
            drained = self._device.drain(partial(self._settle, step, drawn))
        except BaseException as error:  # the device has failed: it raises at every call
            step.future.set_exception(step.error or error)
            return
        drained.add_done_callback(partial(_fail_with, step.future))

    def _settle(self, step: _Step, drawn: object) -> None:
        """Complete the step's future, in the drain thread."""
        try:
            if step.error is not None:
                raise step.error
            output = self.runner.drain(drawn)
            # when a rank leaves its groups, a GPU's collectives end without an error, and with arbitrary results
            if self._has_left and isinstance(self._device, Accelerator) and self._config.parallel.world_size > 1:
                raise ConnectionError(f"rank {self.rank} has stopped its communication")
        except BaseException as error:
            step.future.set_exception(error)
        else:
            seconds, watch = self._compute_seconds(step), self._core_watch
            shares_cores = watch is not None and watch.shares_cores
            refused = self.runner.take_refused_images()
            step.future.set_result(
                replace(output, compute_seconds=seconds, shares_cores=shares_cores, refused_images=refused)
            )
        if self._core_watch is not None:
            self._core_watch.update()

    def _compute_seconds(self, step: _Step) -> float:
        """How long the step computed. Call this when the step has just ended.

        On a GPU the time begins when the step is launched, or when the previous step ends if that is later. If the step's masks
        come late, the wait for the masks is part of the time.
        """
        if not isinstance(self._device, Accelerator):
            return step.compute_seconds
        now = time.perf_counter()
        seconds, self._last_end = now - max(step.started_at, self._last_end), now
        return seconds

    def leave_groups(self, reason: str) -> None:
        self._has_left = True
        self._world.close(reason)


def _fail_with(future: Future[ModelRunnerOutput], drained: Future[None]) -> None:
    """If the device failed before the step could be settled, fail the step's future."""
    error = None if drained.cancelled() else drained.exception()
    if error is not None and not future.done():
        future.set_exception(error)
