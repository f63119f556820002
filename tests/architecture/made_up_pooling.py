"""A made-up kind of request part: pooling of a prompt's hidden states, LAST or MEAN. All of it is in this file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.engine.request.answer_parts import ANSWER_PARTS, AnswerPart
from inflight.engine.request.processed import ProcessedRequest
from inflight.interface.part_kinds import PART_KINDS, RESULT_KINDS
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import Float32Array
from inflight.interface.step import SchedulerOutput
from inflight.models.causal_lm import CausalLM
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.reader import Found, PartReader, PartWork, prompt_rows
from inflight.worker.parts.row_parts import READERS

LAST, MEAN = "last", "mean"
MAX_STEP_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Pooling(RequestPart):
    is_of_leader = True
    max_step_cost = MAX_STEP_TOKENS

    kind: Literal["made_up_pooling"] = "made_up_pooling"
    pooling_type: str
    is_done: bool = False

    @property
    def first_position(self) -> int | None:
        return None if self.is_done else 0

    def after(self, result: PartResult) -> Pooling:
        return replace(self, is_done=True)

    def cost(self, start: int, stop: int) -> int:
        return 0 if self.is_done else stop - start


@dataclass(frozen=True, kw_only=True)
class Pooled(PartResult):
    kind: Literal["made_up_pooling"] = "made_up_pooling"
    values: Float32Array  # [hidden_size]

    @property
    def size(self) -> int:
        return self.values.size

    def joined(self, later: Sequence[Pooled]) -> Pooled:
        return later[-1]


class PoolingReader(PartReader):
    """The compute thread owns the sums. A request begins with its first token."""

    kind = "made_up_pooling"

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, Tensor] = {}

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterator[PartWork]:
        num_tokens = 0
        for row, part in prompt_rows(plan, inputs, batch, self.parts):
            if isinstance(part, Pooling) and not part.is_done:
                num_tokens += row.num_tokens
                end = np.array([row.start + row.num_tokens == batch.num_prompt_tokens[row.slot]], dtype=np.int32)
                yield PartWork(reader=self, part=part, arrays=(end,), **row._asdict())
        READ.append(num_tokens)

    def read(self, hidden: Tensor, work: PartWork, arrays: Sequence[Tensor], model: CausalLM) -> Found:
        assert isinstance(work.part, Pooling)
        rows = hidden[work.first_token : work.first_token + work.num_tokens].float()
        total = rows.sum(dim=0)
        if work.start:
            total += self._sums[work.slot]
        self._sums[work.slot] = total
        mean = total / (work.start + work.num_tokens)
        return [(arrays[0], rows[-1] if work.part.pooling_type == LAST else mean)]

    def to_host(self, work: PartWork, found: Found) -> Pooled | None:
        ((is_end, values),) = found
        return Pooled(values=values.cpu().numpy()) if bool(is_end) else None


class PoolingAnswer(AnswerPart):
    kind = "made_up_pooling"

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        self._values: Float32Array | None = None

    def add(self, result: PartResult) -> None:
        assert isinstance(result, Pooled)
        self._values = result.values

    def value(self) -> Float32Array | None:
        return self._values


# how many tokens each step has pooled, in the order of the steps
READ: list[int] = []


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PART_KINDS, "made_up_pooling", Pooling)
    monkeypatch.setitem(RESULT_KINDS, "made_up_pooling", Pooled)
    monkeypatch.setitem(READERS, "made_up_pooling", PoolingReader)
    monkeypatch.setitem(ANSWER_PARTS, "made_up_pooling", PoolingAnswer)
    READ.clear()


def largest_difference(one: Float32Array, other: Float32Array) -> float:
    return float(torch.from_numpy(one - other).abs().max())
