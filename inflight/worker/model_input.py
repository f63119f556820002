"""What one step carries from stage to stage of a rank: prepare -> forward -> sample -> drain.

Nobody writes to the arrays of a stage that has ended: the next steps run while this one is drained.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inflight.attention.metadata import AttentionMetadata
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, PromptLogprobs, SchedulerOutput
from inflight.sample.metadata import SamplingMetadata
from inflight.sample.rows import SamplingRows
from inflight.sample.sampler import SamplerOutput
from inflight.worker.input_batch import StepInputs
from inflight.worker.prompt_logprobs import PromptLogprobsWork


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Everything the device needs for one step. Nobody writes to its arrays but `execute_model`, to `input_ids`."""

    inputs: StepInputs  # the same on the host
    input_ids: torch.Tensor  # [num_tokens] int32; of `drawn_tokens` not known yet
    positions: torch.Tensor  # [num_tokens] int32
    attn_metadata: tuple[AttentionMetadata, ...]  # one per KV group
    drawn_tokens: torch.Tensor  # [num_drawn] int64, into the step's tokens: inputs drawn in the steps before
    drawn_slots: torch.Tensor  # [num_drawn] int64
    logits_indices: torch.Tensor  # [num_draws] int64, into the step's tokens
    sampling_rows: SamplingRows | None  # [num_draws], on the rank that draws
    metadata: SamplingMetadata | None  # of `sampling_rows`
    num_prompt_tokens: Int32Array  # [num_draws]
    prompt_logprobs: tuple[PromptLogprobsWork, ...]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A plan, prepared: copies of all that its step needs of what later plans change.

    `forward` is None where the plan has rows with drafts. It is made at the head of the forward then.
    """

    plan: SchedulerOutput
    inputs: StepInputs  # of rows with drafts the upper bounds
    block_tables: tuple[Int32Array, ...]  # [num_rows, num_blocks], one per KV group
    sampling_slots: Int32Array  # [num_sampling_rows]
    sampling_rows: SamplingRows | None  # [num_sampling_rows], on the rank that draws
    num_prompt_tokens: Int32Array  # [num_sampling_rows]
    new_histories: tuple[NewRequestData, ...]  # whose tokens the draws or the drafts look at
    prompt_logprobs: tuple[PromptLogprobsWork, ...]
    message: Future[torch.Tensor] | None  # of the tokens that the last stage draws, on a stage that is told
    forward: ForwardInput | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the forward pass of the last stage leaves for `sample`."""

    logits: torch.Tensor  # [num_draws, vocab_size] float32
    prompt_logprobs: tuple[PromptLogprobs, ...]
    forward_input: ForwardInput


@dataclass(frozen=True, slots=True)
class VerifiedDraws:
    """What came of the draws of a step's sampling rows, where drafts are in use."""

    num_emitted: npt.NDArray[np.int64]  # [num_sampling_rows]
    positions: Int32Array  # [num_sampling_rows], of the first token emitted
    draw_start_loc: Int32Array  # [num_sampling_rows + 1]
    drafts: Int32Array  # [num_sampling_rows, k], the next ones


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What a step leaves for the drain thread, still on the device. On ranks that do not draw there is nothing."""

    step_id: int
    drawn: SamplerOutput | None = None
    verified: VerifiedDraws | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
