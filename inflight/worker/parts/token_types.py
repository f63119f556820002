"""`TokenTypesReader`: brings the types of the tokens of pairs to the embedding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.config.pipeline_stage import PipelineStage
from inflight.interface.step import SchedulerOutput
from inflight.interface.token_types import TokenTypesPart
from inflight.models.causal_lm import ModelStep
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.reader import PartReader, PartWork, prompt_rows


class TokenTypesReader(PartReader):
    """`PartWork.arrays` are the types of the work's tokens."""

    kind = "token_types"
    reads_hidden = False

    @staticmethod
    def is_on(stage: PipelineStage) -> bool:
        return stage.is_first

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterator[PartWork]:
        for row, part in prompt_rows(plan, inputs, batch, self.parts):
            assert isinstance(part, TokenTypesPart)
            types = np.arange(row.start, row.start + row.num_tokens) >= part.first
            if types.any():
                yield PartWork(reader=self, part=part, arrays=(types.astype(np.int32),), **row._asdict())

    def extend(self, step: ModelStep, work: PartWork, arrays: Sequence[Tensor]) -> ModelStep:
        types = torch.zeros_like(step.input_ids) if step.token_types is None else step.token_types
        types[work.first_token : work.first_token + work.num_tokens] = arrays[0]
        return step._replace(token_types=types)
