"""What one step carries from stage to stage of a rank: prepare -> forward -> sample -> drain.

Nobody writes to the arrays of a stage that has ended: the next steps run while this one is drained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inflight.attention.metadata import AttentionMetadata
from inflight.interface.request import Int32Array
from inflight.interface.step import (
    KVConnectorOutput,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SchedulerOutput,
)
from inflight.sample.history import HistoryRows
from inflight.sample.metadata import SamplingMetadata
from inflight.sample.sampler import SamplerOutput
from inflight.worker.prompt_logprobs import PromptLogprobsWork


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How the step's rows are drawn; only on the rank that draws."""

    metadata: SamplingMetadata
    history: HistoryRows | None  # for `metadata`, when the tokens before are known
    new_histories: tuple[NewRequestData, ...]  # requests of this step that will have such rows


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Everything the device needs for one step. Nobody writes to its arrays but `execute_model`, to `input_ids`."""

    plan: SchedulerOutput
    input_ids: torch.Tensor  # [num_tokens] int32; of `drawn_tokens` not known yet
    positions: torch.Tensor  # [num_tokens] int32
    attn_metadata: tuple[AttentionMetadata, ...]  # one per KV group
    drawn_tokens: torch.Tensor  # [num_drawn] int64, into the step's tokens: inputs drawn in the steps before
    drawn_slots: torch.Tensor  # [num_drawn] int64
    drawn_in_step: int  # the latest of these steps
    logits_indices: torch.Tensor  # [num_sampling_rows] int64, into the step's tokens
    draw_start_loc: Int32Array  # [num_sampling_rows + 1], the rows' draws
    sampling_slots: Int32Array  # [num_sampling_rows]
    sampling_positions: Int32Array  # [num_sampling_rows], of the token to be drawn
    sampling: SamplingInput | None
    prompt_logprobs: tuple[PromptLogprobsWork, ...]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the forward pass of the last stage leaves for `sample`."""

    logits: torch.Tensor  # [num_sampling_rows, vocab_size] float32
    prompt_logprobs: tuple[PromptLogprobs, ...]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What a step leaves for the drain thread, still on the device. On ranks that do not draw there is nothing."""

    step_id: int
    drawn: SamplerOutput | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def to_output(self) -> ModelRunnerOutput:
        """Copy to the host; waits for the device."""
        token_ids, logprobs, logprobs_rows = (np.empty(0, dtype=np.int32), None, np.empty(0, dtype=np.int32))
        if self.drawn is not None:
            token_ids = self.drawn.token_ids.cpu().numpy().astype(np.int32, copy=False)
            if self.drawn.logprobs is not None and self.drawn.logprobs_rows is not None:
                logprobs, logprobs_rows = self.drawn.logprobs.to_columns(), self.drawn.logprobs_rows
        return ModelRunnerOutput(
            step_id=self.step_id,
            kv_connector_output=KVConnectorOutput(),
            sampled_token_ids=token_ids,
            logprobs=logprobs,
            logprobs_rows=logprobs_rows,
            prompt_logprobs=self.prompt_logprobs,
        )
