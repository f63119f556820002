"""`PartReader`: what a rank does for the request parts of one kind. `PartWork`: what it does for one row in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from inflight.config.pipeline_stage import PipelineStage
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import Int32Array
from inflight.interface.step import SchedulerOutput
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.worker.input_batch import InputBatch, StepInputs

NO_ROW = -1  # `PartWork.row` of work that belongs to the whole step

# What a reader has found, on the device: tensors, in any number of pieces
Found = list[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """The part of one request in one step. It is about the tokens [first_token, first_token + num_tokens) of the step, which
    are at [start, start + num_tokens) of the request.

    Attributes:
        row: of the plan; NO_ROW if the work belongs to no request. Then it has no tokens.
        slot: of the request.
        arrays: what the reader needs on the device. The runner uploads them.
    """

    reader: PartReader
    part: RequestPart
    row: int
    slot: int
    first_token: int
    start: int
    num_tokens: int
    arrays: tuple[Int32Array, ...] = ()


class PartReader(ABC):
    """A rank has one reader of each kind, and a new one after a fault. Three threads call it, each in the order of the steps:

        add, forget, prepare     the thread that prepares steps; it may be several steps ahead
        extend, read             the compute thread; on a GPU they launch kernels and must not wait for the device
        to_host                  the drain thread

    So what is kept between steps belongs to one of these threads. A slot may get its next request while steps of the last one
    are computed: the compute thread knows by `PartWork.start` that a request begins.

    Attributes:
        parts: slot -> the part of its request.
    """

    kind: str
    reads_hidden = True  # whether `read` needs the hidden states of the work's tokens

    def __init__(self) -> None:
        self.parts: dict[int, RequestPart] = {}

    @staticmethod
    def is_on(stage: PipelineStage) -> bool:
        """Whether the ranks of a pipeline stage have this reader. The last stage has the hidden states behind the last norm."""
        return stage.is_last

    def bind(self, model: CausalLM) -> None:
        """Called once, before the first step. `model`: the layers of this stage."""

    def add(self, slot: int, part: RequestPart) -> None:
        """A request with this part has got the slot. If it had the slot before, it begins again."""
        self.parts[slot] = part

    def forget(self, slot: int) -> None:
        """Another request gets the slot."""
        self.parts.pop(slot, None)

    @abstractmethod
    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterable[PartWork]:
        """What to do in this step. Rows with drafts have no work, because it is not yet known which tokens they compute."""

    def extend(self, step: ModelStep, work: PartWork, arrays: Sequence[Tensor]) -> ModelStep:
        """Changes the input of the model, beside the hidden states that are asked for. By default nothing.

        Args:
            arrays: `work.arrays` on the device.
        """
        return step

    def read(self, hidden: Tensor, work: PartWork, arrays: Sequence[Tensor], model: CausalLM) -> Found:
        """Computes what comes of the step.

        Args:
            hidden: hidden states of the step. Those of the work's tokens begin at `work.first_token`, which counts only the
                tokens whose hidden states were computed.
            model: the stage that has computed them. All ranks of the stage must call its `compute_logits` equally often.
        """
        return []

    def to_host(self, work: PartWork, found: Found) -> PartResult | None:
        """Makes the result of what `read` has returned, copied to the host. Only the rank that draws is asked."""
        return None


class PromptRow(NamedTuple):
    """A row of a step that computes tokens of the prompt. See `PartWork`."""

    row: int
    slot: int
    first_token: int
    start: int
    num_tokens: int


def prompt_rows(
    plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch, parts: dict[int, RequestPart]
) -> Iterator[tuple[PromptRow, RequestPart]]:
    """The rows of a step that compute tokens of prompts, for the slots of `parts`."""
    for row, slot in enumerate(plan.slots.tolist()):
        if slot in parts:
            start = int(plan.num_computed_tokens[row])
            num_tokens = min(int(plan.num_scheduled_tokens[row]), int(batch.num_prompt_tokens[slot]) - start)
            if num_tokens > 0:
                yield PromptRow(row, slot, int(inputs.query_start_loc[row]), start, num_tokens), parts[slot]
