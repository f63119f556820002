"""`Runner`: the base class of the runners for CPU and GPU. A runner computes the steps of one rank, each step in four phases.

    prepare_inputs   plan -> the step's inputs; host work and queued copies; waits for neither device nor ranks
    execute_model    -> logits of the rows that draw; on all pipeline stages but the last, the activations
    sample           -> the drawn tokens, on the device
    drain            -> `ModelRunnerOutput`, on the host

One thread prepares, a second executes and samples, a third drains. Each thread handles the steps in order. The thread that
prepares may be several steps ahead. A step's forward may run before the sample of the previous step (see `phase_order`).
"""

from abc import abstractmethod
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.runner_base import RunnerBase


class PreparedStep(Protocol):
    """The type of the object that `prepare_inputs` returns."""

    @property
    def plan(self) -> SchedulerOutput: ...

    @property
    def inputs(self) -> StepInputs: ...


Prepared = TypeVar("Prepared", bound=PreparedStep)
Forward = TypeVar("Forward")
Drawn = TypeVar("Drawn")


class Runner(RunnerBase, Generic[Prepared, Forward, Drawn]):
    """The phases of a step. `Prepared`, `Forward` and `Drawn` are what one phase hands to the next."""

    def _apply_plan(self, plan: SchedulerOutput) -> tuple[InputBatch, StepInputs]:
        """Apply the plan to the batch. Returns the batch and the step's inputs. Runs in the thread that prepares."""
        assert self._batch is not None, "call initialize_from_config first"
        self._batch.apply(plan)
        if self._stage.is_last:
            for data in plan.new_requests:
                self._sampling_state.add(data.slot, data.sampling)
        for data in plan.new_requests:
            if data.parts or self._parts.slots:
                self._parts.add(data)
        return self._batch, self._batch.step_inputs(plan)

    def _post(self, num_rows: int) -> Future[Tensor] | None:
        """Begin to receive the tokens that the last stage draws for `num_rows` rows; None if this rank gets none."""
        return self._inbox.post(num_rows) if num_rows and self._pipeline.receiver is not None else None

    def receive_tokens(self, step: PreparedStep) -> None:
        """Wait until the last stage has sent the drawn tokens that are inputs of this step. It runs in the thread that
        computes, before `execute_model`."""
        if self._pipeline.receiver is not None:
            with self._timeline.span(step.plan.step_id, "receive"):
                self._inbox.receive(step.inputs.drawn_in_step)

    @abstractmethod
    def prepare_inputs(self, plan: SchedulerOutput) -> Prepared:
        """Make the step's inputs from the plan. This waits for neither the device nor other ranks."""

    @abstractmethod
    def execute_model(self, model_input: Prepared, intermediate: IntermediateTensors | None = None) -> Forward:
        """Run the forward pass. Call `receive_tokens` before. The LM head is computed only for rows that draw, and for parts
        of requests that ask for it.

        Args:
            intermediate: the activations that the previous stage returned; None on the first stage. They have as many
                tokens as the plan, and so do the activations that this stage returns.
        """

    @abstractmethod
    def sample(self, model_input: Prepared, forward: Forward, grammar_output: GrammarOutput | None = None) -> Drawn:
        """On the last pipeline stage, draw a token after the last token of each row that draws. In a row with drafts, draw a
        token after each token of the row. Send the tokens to the ranks that need them, here or in `drain`.

        Args:
            grammar_output: the grammar masks; None if no row of the plan has a grammar.
        """

    def discard(self, model_input: Prepared) -> None:
        """Free what the step holds. Called in the compute thread, after the step's forward or its draws have failed."""

    def take_refused_images(self) -> tuple[tuple[bytes, str], ...]:
        """Returns the images that the tower has refused since the last call (`ModelRunnerOutput.refused_images`)."""
        return () if self._model.tower is None else self._model.tower.take_refused()

    @abstractmethod
    def drain(self, drawn: Drawn) -> ModelRunnerOutput:
        """Return the step's output. Runs in the drain thread, while later steps run."""


# Any: whoever calls the phases in their order need not know what a runner hands from one to the next
AnyRunner = Runner[Any, Any, Any]
