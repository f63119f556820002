"""What a commit adds to one request: drawn tokens, tokens that its grammar forces, and whether it ends with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.step import PromptLogprobs
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.request import Request
from inflight.scheduler.sampled import SampledRow

NOTHING_TO_DRAW = "no token could be drawn: the model's logits are not finite, or every token is forbidden"


@dataclass(slots=True)
class StepCounters:
    """Counters since the start."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens asked of the prefix cache
    num_hit_tokens: int = 0
    num_sampled_tokens: int = 0
    num_forced_tokens: int = 0  # emitted without a draw: a grammar admitted no others
    num_draft_tokens: int = 0  # tried
    num_accepted_tokens: int = 0  # of these


class AddedTokens(NamedTuple):
    """`finish_reason` None: the request goes on. `error` says why not, where the reason is ERROR."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str


NOTHING_ADDED = AddedTokens((), None, "")


def add_tokens(
    request: Request, drawn: SampledRow, grammars: RequestGrammars | None, stats: StepCounters
) -> AddedTokens:
    """Append what was drawn, and what a grammar forces then.

    Forced tokens are a function of the grammar and the tokens before, so they are the same in every schedule. Log-probabilities
    come from a draw: a request that wants them draws these tokens as well, one by one, each the only one allowed.
    """
    added: list[int] = []
    reason, error = None, ""
    for position, token in enumerate(drawn.token_ids, drawn.position):
        if position < request.num_tokens:
            continue  # known: the grammar has forced it since the step was planned
        assert position == request.num_tokens, (request.request_id, position)
        reason, error = _append(request, token, grammars, added)
        stats.num_sampled_tokens += 1
        if reason is not None:
            break
    if reason is None and grammars is not None and request.has_grammar and request.sampling.params.logprobs is None:
        for token in grammars.forced_tokens(request, request.max_num_tokens - request.num_tokens):
            request.has_untold_tokens = True
            reason, error = _append(request, token, grammars, added)
            stats.num_forced_tokens += 1
            if reason is not None:
                break
    if request.num_planned_tokens < request.num_tokens:
        request.num_planned_tokens = request.num_tokens
    return AddedTokens(tuple(added), reason, error)


def _append(
    request: Request, token: int, grammars: RequestGrammars | None, added: list[int]
) -> tuple[FinishReason | None, str]:
    """Add one token, to `added` too. A negative one says that none could be drawn."""
    if token < 0:
        return FinishReason.ERROR, NOTHING_TO_DRAW
    has_ended = False
    if request.has_grammar:
        assert grammars is not None
        if error := grammars.advance(request, token):
            return FinishReason.ERROR, error
        has_ended = grammars.has_ended(request)
    request.append(token)
    added.append(token)
    sampling = request.sampling
    if token in sampling.stop_token_ids and request.num_output_tokens >= sampling.params.min_tokens:
        return FinishReason.STOP, ""
    if has_ended:
        return FinishReason.STOP, ""  # whatever min_tokens says: nothing could follow
    return (FinishReason.LENGTH if request.num_tokens >= request.max_num_tokens else None), ""


def make_output(
    request: Request, added: AddedTokens, drawn: SampledRow | None = None, piece: PromptLogprobs | None = None
) -> EngineCoreOutput:
    """What the front end is told. `piece` is of the prompt's log-probabilities.

    A step draws as many log-probabilities for every row as the row that wants most of them: here each gets its own number,
    so that a sequence's columns have one width and can be joined.
    """
    stop_reason, logprobs, num_logprobs = None, None, request.sampling.params.logprobs
    if drawn is not None and drawn.logprobs is not None and num_logprobs is not None:
        logprobs = drawn.logprobs.top(num_logprobs)
    if added.finish_reason is FinishReason.STOP:
        last, sampling = added.token_ids[-1], request.sampling
        stop_reason = last if last in sampling.stop_token_ids and last not in sampling.eos_token_ids else None
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=added.token_ids,
        logprobs=logprobs,
        prompt_logprobs=None if piece is None else piece.columns,
        finish_reason=added.finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        first_scheduled_time=request.first_scheduled_time,
        error=added.error,
    )
