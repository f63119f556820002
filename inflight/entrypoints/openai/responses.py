"""The bodies of answers, for /openapi.json; the answers themselves are written piece by piece, without these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(Body):
    cached_tokens: int


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[TokenLogprob]
    refusal: None = None


class RankedLogprob(Body):
    """One of `prompt_logprobs`, by token id."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class FunctionCall(Body):
    name: str | None = None
    arguments: str


class AnsweredToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(Body):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AnswerMessage(Body):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class Answer(Body):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class MessageDelta(Body):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Body):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inflight"
    root: str
    max_model_len: int


class ModelList(Body):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Body):
    prompt: str


class TokenizerInfo(Body):
    """The answer of /tokenizer_info. Fields have the names of tokenizer_config.json."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None
    model_max_length: int


class Version(Body):
    version: str


class Status(Body):
    status: str
