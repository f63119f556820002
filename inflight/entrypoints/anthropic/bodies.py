"""The JSON objects of Anthropic's answers, as typed dicts, for /openapi.json."""

from typing import Any, Literal, NotRequired

from inflight.entrypoints.http.bodies import Body

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class OutputTokensDetails(Body):
    thinking_tokens: int


class MessageUsage(Body):
    """The prompt has input_tokens + cache_creation_input_tokens + cache_read_input_tokens tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class AnsweredText(Body):
    type: Literal["text"]
    text: str


class AnsweredThinking(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]  # Any: JSON


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class Message(Body):
    """A whole answer. In the event message_start it is empty, and its stop_reason is null."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Body):
    input_tokens: int


class AnthropicError(Body):
    type: str
    message: str


class AnthropicErrorBody(Body):
    type: Literal["error"]
    error: AnthropicError
