"""POST /v1/completions: reads a `CompletionRequest` as a `TextRequest`."""

from dataclasses import replace
from typing import Any

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.thinking_fields import unread_variables
from inflight.entrypoints.http.chat_request import TextRequest
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.thinking import thoughts_of
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


def read_completion(server: ApiServer, body: CompletionRequest) -> TextRequest:
    """
    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    model = server.check_model(body.model)
    body.check_stream()
    prompt_only = body.max_tokens == 0
    if prompt_only and not body.echo:
        raise FieldError(
            "max_tokens",
            "max_tokens=0 without echo gives an empty answer: set echo to true, or give max_tokens of at least 1",
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldError(
            "best_of", f"best_of={body.best_of} differs from n={body.n or 1}, which is not supported: leave out best_of"
        )
    _check_suffix(body)
    thoughts = thoughts_of(body)
    return TextRequest(
        prompts=_given_prompts(body),
        suffix=body.suffix or "",
        add_special_tokens=body.add_special_tokens is not False,
        params=_sampling_params(server, body),
        thoughts=thoughts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        presentation=replace(
            body.presentation(model, force_usage=server.settings.enable_force_include_usage),
            echo=bool(body.echo),
            prompt_only=prompt_only,
        ),
        left_out=unread_variables(body.chat_template_kwargs),
    )


def _check_suffix(body: CompletionRequest) -> None:
    if not body.suffix:
        return
    if not all(isinstance(prompt, str) for prompt in _given_prompts(body)):
        raise FieldError("suffix", "suffix needs prompts of text, but this request has token ids: leave suffix out")
    if body.truncate_prompt_tokens is not None:
        raise FieldError(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens and suffix cannot be combined: truncation cuts off the prefix; leave out one of the two",
        )
    if body.echo and body.logprobs is not None:
        raise FieldError("logprobs", "logprobs cannot be combined with echo and suffix: leave out one of the three")


def _given_prompts(body: CompletionRequest) -> list[str | list[int]]:
    given: Any = body.prompt  # Any: mypy cannot tell a list of token ids from a list of prompts by its first item
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _sampling_params(server: ApiServer, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == -1:
        max_tokens = server.engine.model.max_model_len  # the engine cuts it to the room in the context
    return body.sampling_params(
        server.engine.default_params,
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        echoed=body.logprobs if body.echo else None,
    )
