"""`RowParts`: the readers of a rank. `StepParts`: what they do in one step. Both runners use them in the same way."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from inflight.config.pipeline_stage import PipelineStage
from inflight.errors import EngineError
from inflight.interface.parts import PartResult
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.models.causal_lm import ModelStep
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.prompt_logprobs import PromptLogprobsReader
from inflight.worker.parts.reader import ComputeLogits, Found, PartReader, PartWork

# kind of part -> its reader. Each kind of `PART_KINDS` is here.
READERS: dict[str, type[PartReader]] = {each.kind: each for each in (PromptLogprobsReader,)}


class StepParts:
    """The work of all parts in one step. `arrays` and `found` are on the device."""

    def __init__(self, work: Sequence[PartWork]) -> None:
        self.work = tuple(work)
        self._arrays: list[list[Tensor]] = []
        self._found: list[Found] = []

    def moved(self, by: Int32Array) -> "StepParts":
        """The same work, if the tokens of row i begin `by[i]` later in the step."""
        return StepParts([replace(each, first_token=each.first_token + int(by[each.row])) for each in self.work])

    def upload(self, to_device: Callable[[Int32Array], Tensor]) -> None:
        self._arrays = [[to_device(array) for array in each.arrays] for each in self.work]

    def extend(self, step: ModelStep) -> ModelStep:
        """The input of the model, changed by all parts. Call `upload` before."""
        for work, arrays in zip(self.work, self._arrays, strict=True):
            step = work.reader.extend(step, work, arrays)
        return step

    def read(self, hidden: Tensor, compute_logits: ComputeLogits) -> None:
        """`hidden`: what the model has returned. What the readers find stays on the device."""
        for work, arrays in zip(self.work, self._arrays, strict=True):
            self._found.append(work.reader.read(hidden, work, arrays, compute_logits))

    def copy(self, to_host: Callable[[Tensor], Tensor]) -> None:
        """Replace what the readers have found by its copies."""
        self._found = [[tuple(map(to_host, piece)) for piece in found] for found in self._found]

    def results(self) -> tuple[tuple[int, PartResult], ...]:
        """Returns results with their rows. If they are still on the device, this waits for it."""
        results = (
            (each.row, each.reader.to_host(each, found)) for each, found in zip(self.work, self._found, strict=True)
        )
        return tuple((row, result) for row, result in results if result is not None)


class RowParts:
    """Only the thread that prepares steps calls the methods.

    Attributes:
        slots: the slots whose requests have parts.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._readers = {kind: make() for kind, make in READERS.items() if make.is_on(stage)}
        self.slots = set[int]()

    def add(self, data: NewRequestData) -> None:
        """A request has got its slot.

        Raises:
            EngineError: this rank has no reader for a part of the request.
        """
        for reader in self._readers.values():
            reader.forget(data.slot)
        self.slots.discard(data.slot)
        for part in data.parts:
            if part.kind not in READERS:
                raise EngineError(
                    f"request {data.request_id} has a part of the kind {part.kind!r}; known are {[*READERS]}"
                )
            if part.kind in self._readers:
                self._readers[part.kind].add(data.slot, part)
                self.slots.add(data.slot)

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> StepParts | None:
        """The work of a step; None if there is none."""
        work = [
            each for reader in self._readers.values() if reader.parts for each in reader.prepare(plan, inputs, batch)
        ]
        has_drafts = plan.max_draft_tokens >= 0
        assert not any(len(has_drafts) and has_drafts[each.row] for each in work), plan.describe()
        return StepParts(work) if work else None
