"""POST /v1/completions: a `CompletionRequest` to a `ValidatedRequest`."""

from __future__ import annotations

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.validated import TokenPrompt, ValidatedRequest
from inflight.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


async def validate_completion(server: ApiServer, body: CompletionRequest) -> ValidatedRequest:
    """Check and tokenise; nothing is started.

    Raises:
        ApiError, InvalidRequestError: what the client did wrong.
    """
    model = server.check_model(body.model)
    body.check_stream()
    prompt_only = body.max_tokens == 0
    if prompt_only and not body.echo:
        raise FieldError("max_tokens", "max_tokens=0 asks for nothing without echo; give at least 1")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldError(
            "best_of", f"best_of={body.best_of} is not n={body.n or 1}: only these are served; leave it out"
        )
    prompts = [await _prompt(server, body, given) for given in _given_prompts(body)]
    return ValidatedRequest(
        prompts=tuple(prompts),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        presentation=body.presentation(
            model, top_logprobs=body.logprobs, echo=bool(body.echo), prompt_only=prompt_only
        ),
    )


def _given_prompts(body: CompletionRequest) -> list[str | list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return list(given)


async def _prompt(server: ApiServer, body: CompletionRequest, given: str | list[int]) -> TokenPrompt:
    engine = server.engine
    if isinstance(given, str):
        text: str | None = given
        token_ids = await engine.encode(given, add_special_tokens=body.add_special_tokens is not False)
    else:
        token_ids = given
        text = None
    kept = body.truncate_prompt(token_ids, engine.model.max_model_len)
    if body.echo and (text is None or len(kept) < len(token_ids)):
        text = await engine.decode(kept)
    token_ids = kept
    return TokenPrompt(token_ids=token_ids, text=text, params=_sampling_params(server, body))


def _sampling_params(server: ApiServer, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echoed = body.logprobs if body.echo else None
    return body.sampling_params(
        server.engine.default_params,
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=echoed if body.prompt_logprobs is None else max(body.prompt_logprobs, echoed or 0),
    )
