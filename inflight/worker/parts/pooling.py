"""`PoolingReader`: makes vectors of the hidden states of prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight.config.pooler import ALL, CLS, LAST, MAX, MEAN
from inflight.interface.pooling import PoolingPart, PoolingResult
from inflight.interface.step import SchedulerOutput
from inflight.layers.pooler import Pooler, activate
from inflight.models.causal_lm import CausalLM
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.reader import Found, PartReader, PartWork, prompt_rows

_TOKENS_AT_ONCE = 64  # for which a head for the vocabulary is computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingWork(PartWork):
    """`is_end`: the work has the last token of the prompt."""

    is_end: bool


class PoolingReader(PartReader):
    """The sums (with MAX the largest numbers) of prompts that take several steps belong to the compute thread. Sums are in
    float64, in which the sum of a few thousand numbers of a model hardly depends on their order. So a vector does not depend on
    how a prompt is divided."""

    kind = "pooling"

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, Tensor] = {}

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterator[PoolingWork]:
        for (row, slot, first_token, start, num_tokens), part in prompt_rows(plan, inputs, batch, self.parts):
            assert isinstance(part, PoolingPart)
            end = start + num_tokens
            is_end = end == int(batch.num_prompt_tokens[slot])
            if part.pooling_type == ALL:
                skipped = max(part.num_done - start, 0)
                if skipped >= num_tokens:
                    continue
                first_token, start, num_tokens = first_token + skipped, start + skipped, num_tokens - skipped
                self.parts[slot] = replace(part, num_done=end)
            elif part.num_done:
                continue
            elif part.pooling_type == CLS:
                if start:
                    continue
                num_tokens = 1
            elif part.pooling_type == LAST:
                if not is_end:
                    continue
                first_token, start, num_tokens = first_token + num_tokens - 1, end - 1, 1
            yield PoolingWork(
                reader=self,
                part=part,
                row=row,
                slot=slot,
                first_token=first_token,
                start=start,
                num_tokens=num_tokens,
                is_end=is_end,
            )

    def read(self, hidden: Tensor, work: PartWork, arrays: Sequence[Tensor], model: CausalLM) -> Found:
        part = work.part
        assert isinstance(part, PoolingPart) and isinstance(work, PoolingWork)
        rows = hidden[work.first_token : work.first_token + work.num_tokens]
        is_head_before = model.pooler is not None and model.pooler.spec.is_head_before
        if part.pooling_type == MEAN:
            if model.pooler is not None and is_head_before:
                rows = model.pooler(rows.float())
            total = rows.double().sum(dim=0, keepdim=True)
            if work.start:
                total += self._sums.pop(work.slot)
            if not work.is_end:
                self._sums[work.slot] = total
                return []
            rows = total / (work.start + work.num_tokens)
        if part.pooling_type == MAX:
            before = model.pooler if is_head_before else None
            largest = _largest(rows, before)
            if work.start:
                largest = torch.maximum(largest, self._sums.pop(work.slot))
            if not work.is_end:
                self._sums[work.slot] = largest
                return []
            rows = largest
        vectors = rows.float()
        if model.pooler is not None and not is_head_before:
            vectors = model.pooler(vectors)
        return [(activate(vectors[:, : part.dimensions], part.activation),)]

    def to_host(self, work: PartWork, found: Found) -> PoolingResult | None:
        if not found:
            return None
        ((vectors,),) = found
        assert isinstance(work.part, PoolingPart)
        start = work.start if work.part.pooling_type == ALL else 0
        return PoolingResult(start=start, vectors=vectors.cpu().numpy())


def _largest(rows: Tensor, head: Pooler | None) -> Tensor:
    """Of each number the largest among all rows, behind `head`: float32 [1, size]."""
    pieces = [rows[first : first + _TOKENS_AT_ONCE].float() for first in range(0, len(rows), _TOKENS_AT_ONCE)]
    largest = [(piece if head is None else head(piece)).amax(dim=0, keepdim=True) for piece in pieces]
    return torch.cat(largest).amax(dim=0, keepdim=True)
