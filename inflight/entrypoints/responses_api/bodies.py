"""The JSON objects of the answers of /v1/responses, as typed dicts. /openapi.json describes them."""

from typing import Any, Literal, NotRequired

from inflight.entrypoints.http.bodies import Body, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Body):
    type: Literal["output_text"]
    text: str
    annotations: list[None]  # always empty
    logprobs: list[TokenLogprob]


class OutputMessage(Body):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Body):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[None]  # always empty
    content: list[ReasoningText]


class FunctionToolCall(Body):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomToolCall(Body):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class InputTokensDetails(Body):
    cached_tokens: int
    cache_write_tokens: int  # 0: they are not counted


class OutputTokensDetails(Body):
    reasoning_tokens: int


class ResponseUsage(Body):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Body):
    code: str
    message: str


class IncompleteDetails(Body):
    reason: Literal["max_output_tokens"]


class ResponseState(Body):
    """The members that change while the response is written."""

    status: ResponseStatus
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None


class Response(ResponseState):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    output: list[OutputMessage | Reasoning | FunctionToolCall | CustomToolCall]
    # most of the other members repeat the request
    instructions: str | None
    tools: list[dict[str, Any]]  # Any: JSON
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"]
    background: bool
    store: bool
    previous_response_id: str | None
    service_tier: Literal["default"]
    metadata: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None


class ResponseEvent(Body):
    """An event of a stream. Further members depend on its type."""

    type: str
    sequence_number: int


class InputItemList(Body):
    object: Literal["list"]
    data: list[dict[str, Any]]  # Any: JSON; items as the request had them, and those of earlier answers
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Body):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Body):
    object: Literal["response.input_tokens"]
    input_tokens: int
