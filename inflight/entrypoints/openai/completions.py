"""POST /v1/completions: checks and tokenises a `CompletionRequest` into a `ValidatedRequest`."""

from dataclasses import replace
from typing import Any

from inflight.engine.request.answer_frames import FIND
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.thinking import thoughts_of
from inflight.entrypoints.openai.thinking_fields import TEMPLATE_VARIABLES, THINKING_VARIABLES
from inflight.entrypoints.openai.validated import TokenPrompt, ValidatedRequest
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
# Models that can fill in a text between a prefix and a suffix. Each family has three special tokens: one before the prefix, one
# before the suffix, and one before the answer.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
_MARK = "\N{WHITE SMILING FACE}"  # see `_encode_suffix`


async def validate_completion(server: ApiServer, body: CompletionRequest) -> ValidatedRequest:
    """Check and tokenise a request. No generation is started.

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
    # a completion has no chat template, so an effort can only be a bound
    params, ignored = thoughts_of(body).bound(_sampling_params(server, body), server.parsers, writes_efforts=False)
    prompts = [await _prompt(server.engine, body, given) for given in _given_prompts(body)]
    return ValidatedRequest(
        prompts=tuple(prompts),
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        answer_frame=FIND,
        presentation=replace(
            body.presentation(model, force_usage=server.settings.enable_force_include_usage),
            echo=bool(body.echo),
            prompt_only=prompt_only,
        ),
        left_out=(
            *ignored,
            *([TEMPLATE_VARIABLES] if (body.chat_template_kwargs or {}).keys() - THINKING_VARIABLES else ()),
        ),
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
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


async def _prompt(engine: AsyncLLM, body: CompletionRequest, given: str | list[int]) -> TokenPrompt:
    text = given if isinstance(given, str) else None
    token_ids = await _encode(engine, body, given) if isinstance(given, str) else given
    kept = body.truncate_prompt(token_ids, engine.model.max_model_len)
    if body.echo and (text is None or len(kept) < len(token_ids)):
        text = await engine.decode(kept)
    return TokenPrompt(kept, text)


async def _encode(engine: AsyncLLM, body: CompletionRequest, text: str) -> list[int]:
    """The tokens of a prompt. If the request has a suffix, they ask the model for the text between `text` and the suffix."""
    adds_special_tokens = body.add_special_tokens is not False
    if not body.suffix:
        return await engine.encode(text, add_special_tokens=adds_special_tokens)
    tokens = None if engine.tokenizer is None else find_fim_tokens(engine.tokenizer)
    if tokens is None:
        raise FieldError(
            "suffix", "suffix needs a model with fill-in-the-middle tokens, and this model has none: leave suffix out"
        )
    before_prefix, before_suffix, before_answer = tokens
    special = await engine.encode("", add_special_tokens=adds_special_tokens)  # usually only the BOS token
    prefix = await engine.encode(text, add_special_tokens=False)
    suffix = await _encode_suffix(engine, body.suffix)
    return [*special, before_prefix, *prefix, before_suffix, *suffix, before_answer]


def find_fim_tokens(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids of the three tokens of one family in `_FIM_TOKENS`, or None if the tokenizer has the tokens of no family."""
    for texts in _FIM_TOKENS:
        found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if all(len(ids) == 1 and tokenizer.id_to_piece(ids[0]) == text for ids, text in zip(found, texts, strict=True)):
            return tuple(ids[0] for ids in found)
    return None


async def _encode_suffix(engine: AsyncLLM, suffix: str) -> list[int]:
    """Tokenise the suffix without a blank before it. A sentencepiece tokenizer puts a blank before each text. So this function
    puts a mark before the suffix, and drops the tokens of the blank and the mark. Code Llama's own code does the same."""
    mark = await engine.encode(_MARK, add_special_tokens=False)
    if engine.tokenizer is None or not (engine.tokenizer.id_to_piece(mark[0]) or "").startswith("\u2581"):
        return await engine.encode(suffix, add_special_tokens=False)
    return (await engine.encode(_MARK + suffix, add_special_tokens=False))[len(mark) :]


def _sampling_params(server: ApiServer, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == -1:
        max_tokens = server.engine.model.max_model_len  # the engine cuts it to the room in the context
    echoed = body.logprobs if body.echo else None
    return body.sampling_params(
        server.engine.default_params,
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=echoed if body.prompt_logprobs is None else max(body.prompt_logprobs, echoed or 0),
    )
