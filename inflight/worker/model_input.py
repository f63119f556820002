"""The data of one step of `ModelRunner`, handed from phase to phase: prepare -> forward -> sample -> drain.

After a phase has ended, nobody writes to the arrays that it made, because the drain thread and later steps may still read them.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from inflight.attention.metadata import AttentionMetadata
from inflight.interface.request import Int32Array
from inflight.interface.step import ModelRunnerOutput, NewRequestData, SchedulerOutput
from inflight.sample.rows import SamplingMetadata, SamplingRows
from inflight.sample.sampler import SamplerOutput
from inflight.worker.draw_rows import VerifiedDraws
from inflight.worker.input_batch import StepInputs
from inflight.worker.parts.row_parts import StepParts


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Everything the device needs for one step, besides the input tokens: the last of them are known when it begins."""

    inputs: StepInputs  # the same inputs, on the host
    positions: torch.Tensor  # [num_tokens] int32
    attn_metadata: tuple[AttentionMetadata, ...]  # one per KV group
    logits_indices: torch.Tensor  # [num_draws] int64, into the step's tokens
    sampling_rows: SamplingRows | None  # [num_draws], on the rank that draws
    metadata: SamplingMetadata | None  # made from `sampling_rows`
    draw_positions: Int32Array  # [num_draws]: how many tokens come before each drawn token
    num_prompt_tokens: Int32Array  # [num_draws]
    parts: StepParts | None


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A prepared plan (the scheduler's output for one step). It has copies of all data that later plans change.

    If the plan has rows with drafts, `forward` is None at first, and is made when the forward pass begins.
    """

    plan: SchedulerOutput
    inputs: StepInputs  # rows with drafts have the most drafts that the plan allows
    block_tables: tuple[Int32Array, ...]  # [num_rows, num_blocks], one per KV group
    sampling_slots: Int32Array  # [num_sampling_rows]
    sampling_rows: SamplingRows | None  # [num_sampling_rows], on the rank that draws
    num_prompt_tokens: Int32Array  # [num_sampling_rows]
    new_histories: tuple[NewRequestData, ...]  # the new requests whose older tokens affect their draws or drafts
    parts: StepParts | None  # what the step does for parts of requests
    rope_deltas: Int32Array  # [num_rows], see `StepInputs.rope_positions`
    message: Future[torch.Tensor] | None  # the tokens that the last pipeline stage draws and sends to this stage
    forward: ForwardInput | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The results of the forward pass on the last pipeline stage. `sample` draws from them."""

    logits: torch.Tensor  # [num_draws, vocab_size] float32
    forward_input: ForwardInput
    # [num_tokens, hidden_size], or what was captured, if a drafter reads it; otherwise perhaps of fewer tokens
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The results of a step for the drain thread, still on the device. On ranks that do not draw, it has only the step
    id."""

    step_id: int
    drawn: SamplerOutput | None = None
    verified: VerifiedDraws | None = None
    parts: StepParts | None = None

    def to_output(self) -> ModelRunnerOutput:
        """Copy the results to the host and return the step's output. This waits for the device."""
        drawn, results = self.drawn, () if self.parts is None else self.parts.results()
        if drawn is None:
            return ModelRunnerOutput(step_id=self.step_id, parts=results)
        tokens = drawn.token_ids.cpu().numpy()
        output = ModelRunnerOutput(step_id=self.step_id, sampled_token_ids=tokens, parts=results)
        if drawn.logprobs is not None and drawn.logprobs_rows is not None:
            output = replace(output, logprobs=drawn.logprobs.to_columns(), logprobs_rows=drawn.logprobs_rows)
        return output if self.verified is None else self.verified.emitted(output)
