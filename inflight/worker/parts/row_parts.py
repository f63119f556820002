"""`RowParts`: the readers of a rank. `StepParts`: what they do in one step. Both runners use them in the same way."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from inflight.config.pipeline_stage import PipelineStage
from inflight.errors import EngineError
from inflight.interface.parts import PartResult
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.images import ImagesReader
from inflight.worker.parts.pooling import PoolingReader
from inflight.worker.parts.prompt_logprobs import PromptLogprobsReader
from inflight.worker.parts.reader import Found, PartReader, PartWork
from inflight.worker.parts.token_types import TokenTypesReader

# kind of part -> its reader. Each kind of `PART_KINDS` is here.
READERS: dict[str, type[PartReader]] = {
    each.kind: each for each in (PromptLogprobsReader, PoolingReader, TokenTypesReader, ImagesReader)
}


class StepParts:
    """The work of all parts in one step. `arrays` and `found` are on the device.

    If each work needs the hidden state of one token, only those are computed, behind those that the step needs anyway. Else
    the hidden states of all tokens are.
    """

    def __init__(self, work: Sequence[PartWork]) -> None:
        self.work = tuple(work)
        self._arrays: list[list[Tensor]] = []
        self._found: list[Found] = []
        self._reading = [each for each in self.work if each.reader.reads_hidden]
        self._reads_few = all(each.num_tokens == 1 for each in self._reading)
        self._tokens: Tensor | None = None  # of `_reading`, if they are few
        self._first: int | None = None  # where their hidden states begin; None if all tokens have theirs

    def moved(self, by: Int32Array) -> "StepParts":
        """The same work, if the tokens of row i begin `by[i]` later in the step."""
        return StepParts([replace(each, first_token=each.first_token + int(by[each.row])) for each in self.work])

    def upload(self, to_device: Callable[[Int32Array], Tensor]) -> None:
        self._arrays = [[to_device(array) for array in each.arrays] for each in self.work]
        if self._reading and self._reads_few:
            self._tokens = to_device(np.array([each.first_token for each in self._reading], dtype=np.int32))

    def extend(self, step: ModelStep) -> ModelStep:
        """The input of the model, changed by all parts. Call `upload` before."""
        rows = step.rows
        if self._tokens is not None and rows is not None:
            self._first = len(rows)
            step = step._replace(rows=torch.cat([rows, self._tokens.to(rows.dtype)]))
        elif self._reading:
            step = step._replace(rows=None)
        for work, arrays in zip(self.work, self._arrays, strict=True):
            step = work.reader.extend(step, work, arrays)
        return step

    def read(self, hidden: Tensor, model: CausalLM) -> None:
        """`hidden`: what the model has returned. What the readers find stays on the device."""
        places = count(self._first or 0)
        for work, arrays in zip(self.work, self._arrays, strict=True):
            is_among_few = self._first is not None and work.reader.reads_hidden
            place = replace(work, first_token=next(places)) if is_among_few else work
            self._found.append(work.reader.read(hidden, place, arrays, model))

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

    def __init__(self, stage: PipelineStage, model: CausalLM) -> None:
        self._readers = {kind: make() for kind, make in READERS.items() if make.is_on(stage)}
        for reader in self._readers.values():
            reader.bind(model)
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
            each
            for reader in self._readers.values()
            if reader.parts or plan.encoder_inputs
            for each in reader.prepare(plan, inputs, batch)
        ]
        with_drafts = set(np.flatnonzero(plan.max_draft_tokens >= 0).tolist())
        assert not any(each.row in with_drafts for each in work), plan.describe()
        return StepParts(work) if work else None
