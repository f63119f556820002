"""The JSON objects of the answers of OpenAI's API, as typed dicts, for /openapi.json."""

from typing import Literal, NotRequired

from inflight.entrypoints.http.bodies import Body, TokenLogprob, Usage

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class ChatLogprobs(Body):
    content: list[TokenLogprob]
    refusal: None


class RankedLogprob(Body):
    """The log-probability of one token at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


# One entry for each position of the prompt. The first entry is None. The keys of the others are token ids, as text.
PromptLogprobs = list[dict[str, RankedLogprob] | None]


class FunctionCall(Body):
    name: str
    arguments: str


class AnsweredToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(Body):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(Body):
    """The first delta of a call has all members. Later deltas have further parts of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class AnswerMessage(Body):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredToolCall]]
    function_call: NotRequired[FunctionCall]  # instead of tool_calls, for a request with functions


class ChatChoice(Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class Answer(Body):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class MessageDelta(Body):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionCallDelta]


class ChatChunkChoice(Body):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class Timings(Body):
    """llama.cpp's: numbers of tokens, milliseconds. `cache_n` tokens of the prompt were cached, `prompt_n` were computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptProgress(Body):
    """llama.cpp's: tokens of the prompt, `processed` with those that were cached; milliseconds since the request began."""

    total: int
    cache: int
    processed: int
    time_ms: float


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]
    prompt_token_ids: NotRequired[list[int]]


class LogprobColumns(Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(Answer):
    """A whole answer, or an event of a stream. An event has one choice, and the usage only if the client asks for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class ModelCard(Body):
    """A model as OpenAI's clients read it, vLLM's (root, max_model_len), Anthropic's (type and what follows it) and
    OpenRouter's (input_modalities)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    input_modalities: list[Literal["text", "image"]]


class ModelList(Body):
    """`has_more` and what follows it are read by Anthropic's clients."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Tokens(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizedText(Body):
    prompt: str


class TokenizerInfo(Body):
    """The answer of /tokenizer_info. Members have the names of tokenizer_config.json."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
