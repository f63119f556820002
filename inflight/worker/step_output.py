"""From what a step has drawn, on the device, to its answer, on the host. In the drain thread."""

from __future__ import annotations

import numpy as np

from inflight.interface.request import Int32Array, LogprobsColumns
from inflight.interface.step import ModelRunnerOutput
from inflight.sample.sampler import SamplerOutput
from inflight.sample.verification import emitted_rows
from inflight.worker.model_input import DrawnStep

NOTHING: Int32Array = np.empty(0, dtype=np.int32)


def to_output(step: DrawnStep) -> ModelRunnerOutput:
    """Copies to the host; waits for the device."""
    if step.drawn is None:
        return ModelRunnerOutput(step_id=step.step_id, prompt_logprobs=step.prompt_logprobs)
    token_ids = step.drawn.token_ids.cpu().numpy().astype(np.int32, copy=False)
    logprobs, rows = _logprobs(step.drawn)
    verified = step.verified
    if verified is None:
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=token_ids,
            logprobs=logprobs,
            logprobs_rows=rows,
            prompt_logprobs=step.prompt_logprobs,
        )
    emitted = emitted_rows(verified.num_emitted, verified.draw_start_loc)
    if logprobs is not None:
        kept = np.isin(rows, emitted)
        logprobs = LogprobsColumns(
            token_ids=logprobs.token_ids[kept], logprobs=logprobs.logprobs[kept], ranks=logprobs.ranks[kept]
        )
        rows = np.searchsorted(emitted, rows[kept]).astype(np.int32)
    return ModelRunnerOutput(
        step_id=step.step_id,
        sampled_token_ids=token_ids[emitted],
        num_sampled_tokens=verified.num_emitted.astype(np.int32),
        sampled_positions=verified.positions,
        logprobs=logprobs,
        logprobs_rows=rows,
        prompt_logprobs=step.prompt_logprobs,
        draft_token_ids=verified.drafts,
    )


def _logprobs(drawn: SamplerOutput) -> tuple[LogprobsColumns | None, Int32Array]:
    if drawn.logprobs is None or drawn.logprobs_rows is None:
        return None, NOTHING
    return drawn.logprobs.to_columns(), drawn.logprobs_rows
