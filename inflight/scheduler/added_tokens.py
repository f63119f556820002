"""What a committed step adds to one request: the tokens that the step drew, and tokens that a grammar forces after them.

To commit a step is to add its results to the requests. A draft is a guessed token, which a later step verifies.
"""

from typing import NamedTuple

import numpy as np

from inflight.errors import ErrorKind
from inflight.interface.parts import PartResult
from inflight.interface.request import EngineCoreOutput, FinishReason, LogprobsColumns
from inflight.interface.statistics import StepCounts
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.request import Request, RequestStatus

# The most forced tokens that one commit adds to a request. The engine waits while they are found, up to 2 ms for each.
MAX_FORCED_TOKENS = 16
NOTHING_TO_DRAW = "no token could be drawn: the model's logits are not finite, or every token is forbidden"


class SampledRow(NamedTuple):
    """The tokens that a step drew for one row. The first token is at `position`. `drafts` are proposed to follow the last
    token."""

    position: int
    token_ids: list[int]
    logprobs: LogprobsColumns | None
    drafts: list[int]


def sampled_rows(plan: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, SampledRow]:
    """Returns, for each row of the plan that draws, index of the row -> what was drawn for it."""
    rows = plan.samples.nonzero()[0]
    if output.num_sampled_tokens.size:
        counts = output.num_sampled_tokens
        positions = output.sampled_positions
    else:
        counts = np.ones(len(rows), dtype=np.int32)
        positions = (plan.num_computed_tokens + plan.num_scheduled_tokens)[rows]
    ends = np.cumsum(counts).tolist()
    assert len(counts) == len(rows) and (ends[-1] if ends else 0) == len(output.sampled_token_ids), plan.step_id
    token_ids = output.sampled_token_ids.tolist()
    drafts = output.draft_token_ids.tolist() if output.draft_token_ids.size else None
    columns = output.logprobs
    if drafts is None and columns is None and not output.num_sampled_tokens.size:  # most steps
        drawn = zip(rows.tolist(), positions.tolist(), token_ids, strict=True)
        return {row: SampledRow(position, [token_id], None, []) for row, position, token_id in drawn}
    # `logprobs_rows` is sorted, so the entries of one row are next to each other
    asked = np.searchsorted(output.logprobs_rows, ends).tolist() if columns is not None else None
    found: dict[int, SampledRow] = {}
    start = first_asked = 0
    for j, (row, position, end) in enumerate(zip(rows.tolist(), positions.tolist(), ends, strict=True)):
        logprobs = None
        if asked is not None and columns is not None:
            if asked[j] > first_asked:
                logprobs = columns.rows(first_asked, asked[j])
            first_asked = asked[j]
        proposed = [] if drafts is None else [token for token in drafts[j] if token >= 0]
        found[row] = SampledRow(position, token_ids[start:end], logprobs, proposed)
        start = end
    return found


class AddedTokens(NamedTuple):
    """What one commit adds to a request. If `finish_reason` is None, the request continues. If it is ERROR, `error` says
    why."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str
    error_kind: ErrorKind = ErrorKind.REQUEST
    error_param: str = ""


NOTHING_ADDED = AddedTokens((), None, "")
END_OF_PROMPT = AddedTokens((), FinishReason.STOP, "")  # of a request that draws nothing


def add_tokens(
    request: Request, drawn: SampledRow | None, grammars: RequestGrammars, stats: StepCounts, num_computed: int = 0
) -> AddedTokens:
    """Append the drawn tokens to the request, and then the tokens that its grammar forces (the only ones that it allows).

    If the row draws nothing (`drawn` is None), a request that only wants its prompt computed ends when `num_computed` tokens,
    all of it, are.

    Forced tokens depend only on the grammar and the earlier tokens, so every schedule gives the same tokens. If a request wants
    log-probabilities, no tokens are forced here, because only a draw computes log-probabilities. Then the token is drawn under
    a mask that allows no other token.
    """
    if drawn is None:
        return END_OF_PROMPT if request.only_prompt and num_computed >= request.num_tokens else NOTHING_ADDED
    added: list[int] = []
    reason, error, kind = None, "", ErrorKind.REQUEST
    for position, token in enumerate(drawn.token_ids, drawn.position):
        if position < request.num_tokens:
            continue  # after this step was planned, the grammar forced the same token at this position
        assert position == request.num_tokens, (request.request_id, position)
        if token < 0:  # no request can forbid every token, so the logits are wrong
            reason, error, kind = FinishReason.ERROR, NOTHING_TO_DRAW, ErrorKind.ENGINE
        else:
            reason, error = _append(request, token, grammars, added)
        stats.num_sampled_tokens += 1
        if reason is not None:
            break
    if reason is None and request.has_grammar:
        if request.sampling.params.logprobs is None:
            reason, error = _append_forced(request, grammars, added, stats)
        request.first_masked = request.num_tokens + grammars.manager.num_free(request.request_id)
    if request.num_planned_tokens < request.num_tokens:
        request.num_planned_tokens = request.num_tokens
    return AddedTokens(tuple(added), reason, error, kind)


def _append_forced(
    request: Request, grammars: RequestGrammars, added: list[int], stats: StepCounts
) -> tuple[FinishReason | None, str]:
    """Append the tokens that the grammar forces. Returns the same as `_append`."""
    most = min(MAX_FORCED_TOKENS, request.max_num_tokens - request.num_tokens)
    for token in grammars.manager.forced_tokens(request.request_id, most):
        request.has_unsent_tokens = True
        stats.num_forced_tokens += 1
        reason, error = _append(request, token, grammars, added)
        if reason is not None:
            return reason, error
    return None, ""


def _append(
    request: Request, token: int, grammars: RequestGrammars, added: list[int]
) -> tuple[FinishReason | None, str]:
    """Append one token to the request and to `added`. Returns why the request ends, and the error if there is one."""
    has_ended = False
    if request.has_grammar:
        if error := grammars.manager.advance(request.request_id, token):
            return FinishReason.ERROR, error
        has_ended = grammars.manager.has_ended(request.request_id)
    request.append(token)
    added.append(token)
    sampling = request.sampling
    # a grammar ends the request even before min_tokens, because it allows no more tokens
    if has_ended or (token in sampling.stop_token_ids and request.num_output_tokens >= sampling.params.min_tokens):
        return FinishReason.STOP, ""
    return (FinishReason.LENGTH if request.num_tokens >= request.max_num_tokens else None), ""


def take_back_rejected(
    request: Request, drawn: SampledRow, num_scheduled: int, max_drafts: int, stats: StepCounts
) -> int:
    """The plan assumed that all drafts are computed and accepted. Subtract the others from the request's numbers of tokens.
    Returns how many tokens of the request are computed."""
    num_rejected = num_scheduled - len(drawn.token_ids)
    request.num_planned_tokens -= num_rejected
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens -= num_rejected
    stats.record_drafts(min(max_drafts, len(request.draft_token_ids)), len(drawn.token_ids) - 1)
    return drawn.position - 1 + len(drawn.token_ids)


def make_output(
    request: Request, added: AddedTokens, drawn: SampledRow | None = None, parts: tuple[PartResult, ...] = ()
) -> EngineCoreOutput:
    """Make the output for the front end. `parts`: what the step has found for the request's parts.

    A step computes the same number of log-probabilities for all rows: the largest number that any row wants. This function
    cuts off those that this request does not want. So all outputs of a request have the same number of columns.
    """
    stop_reason, logprobs, num_logprobs = None, None, request.sampling.params.logprobs
    if drawn is not None and drawn.logprobs is not None and num_logprobs is not None:
        logprobs = drawn.logprobs.top(num_logprobs)
    if added.finish_reason is FinishReason.STOP and added.token_ids:
        last, sampling = added.token_ids[-1], request.sampling
        stop_reason = last if last in sampling.stop_token_ids and last not in sampling.eos_token_ids else None
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=added.token_ids,
        logprobs=logprobs,
        parts=parts,
        finish_reason=added.finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        queue_seconds=request.queue_seconds,
        error=added.error,
        error_kind=added.error_kind,
        error_param=added.error_param,
    )
