"""Checks and tokenises a `TextRequest` into a `ValidatedRequest`, also one for the text between a prefix and a suffix."""

from inflight.engine.request.answer_frames import FIND
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.entrypoints.fields.field_error import prompt_of_list
from inflight.entrypoints.http.chat_request import TextRequest
from inflight.entrypoints.http.rendering import truncated
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.validated import TokenPrompt, ValidatedRequest
from inflight.errors import InvalidRequestError
from inflight.tokenizer.tokenizer import Tokenizer

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


async def validate_text(server: ApiServer, request: TextRequest) -> ValidatedRequest:
    """Check and tokenise a request. No generation is started.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    # without a chat template, an effort can only be a bound
    params, ignored = request.thoughts.bound(request.params, server.parsers, writes_efforts=False)
    prompts = []
    for index, given in enumerate(request.prompts):
        with prompt_of_list(index, len(request.prompts)):
            prompts.append(await _prompt(server.engine, request, given))
    return ValidatedRequest(
        prompts=tuple(prompts),
        params=params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        answer_frame=FIND,
        presentation=request.presentation,
        left_out=(*ignored, *request.left_out),
    )


async def _prompt(engine: AsyncLLM, request: TextRequest, given: str | list[int]) -> TokenPrompt:
    text = given if isinstance(given, str) else None
    token_ids = await _encode(engine, request, given) if isinstance(given, str) else given
    whole = TokenPrompt(token_ids, text)
    kept = truncated(whole, request.truncate_prompt_tokens, engine.model.max_model_len)
    if request.presentation.echo and (text is None or kept is not whole):
        return TokenPrompt(kept.token_ids, await engine.decode(kept.token_ids))
    return kept


async def _encode(engine: AsyncLLM, request: TextRequest, text: str) -> list[int]:
    """The tokens of a prompt. If the request has a suffix, they ask the model for the text between `text` and the suffix."""
    adds_special_tokens = request.add_special_tokens
    if not request.suffix:
        return await engine.encode(text, add_special_tokens=adds_special_tokens)
    tokens = None if engine.tokenizer is None else find_fim_tokens(engine.tokenizer)
    if tokens is None:
        raise InvalidRequestError(
            "suffix needs a model with fill-in-the-middle tokens, and this model has none: leave suffix out", "suffix"
        )
    before_prefix, before_suffix, before_answer = tokens
    special = await engine.encode("", add_special_tokens=adds_special_tokens)  # usually only the BOS token
    prefix = await engine.encode(text, add_special_tokens=False)
    suffix = await _encode_suffix(engine, request.suffix)
    return [*special, before_prefix, *prefix, before_suffix, *suffix, before_answer]


def find_fim_tokens(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids of the three tokens of one family in `_FIM_TOKENS`, or None if the tokenizer has the tokens of no family."""
    for texts in _FIM_TOKENS:
        found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        pairs = zip(found, texts, strict=True)
        if all(len(ids) == 1 and tokenizer.id_to_piece(ids[0]) == text for ids, text in pairs):
            return tuple(ids[0] for ids in found)
    return None


async def _encode_suffix(engine: AsyncLLM, suffix: str) -> list[int]:
    """Tokenise the suffix without a blank before it. A sentencepiece tokenizer puts a blank before each text. So this function
    puts a mark before the suffix, and drops the tokens of the blank and the mark. Code Llama's own code does the same."""
    mark = await engine.encode(_MARK, add_special_tokens=False)
    if engine.tokenizer is None or not (engine.tokenizer.id_to_piece(mark[0]) or "").startswith("\u2581"):
        return await engine.encode(suffix, add_special_tokens=False)
    return (await engine.encode(_MARK + suffix, add_special_tokens=False))[len(mark) :]
