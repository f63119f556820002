"""The bodies of requests to all endpoints, as pydantic models. /openapi.json is made from these models, too."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.openai.generation_fields import MAX_INT, GenerationFields, TokenId, sampling_field
from inflight.entrypoints.openai.messages import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Tool, ToolChoice
from inflight.entrypoints.openai.strict_model import StrictModel, neutral, no_effect
from inflight.sampling_params import MAX_N

MAX_PROMPTS = 256  # per completion request
MAX_DOCUMENTS = 1024

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
ReasoningEffort = Annotated[str, Field(min_length=1, max_length=32)]


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(StrictModel):
    """The fields that decide how messages become a prompt."""

    messages: Messages | None = Field(None, description="The conversation.")
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions the model may call."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin a message of the assistant; true if left out, except with continue_final_message."
    )
    continue_final_message: bool | None = Field(None, description="Continue the last message, and begin no new one.")
    chat_template: Annotated[None, neutral("Not supported: --chat-template sets the server's.")] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the template.")
    documents: list[dict[str, Any]] | None = Field(
        None,
        max_length=MAX_DOCUMENTS,
        description="Documents for the chat template, usually objects with title and text.",
    )
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its special tokens; false if left out, because the template has them."
    )


class ChatCompletionRequest(ChatTemplateFields, GenerationFields):
    """POST /v1/chat/completions"""

    messages: Messages = Field(description="The conversation.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="The most tokens of an answer.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="Older name of max_completion_tokens.")
    logprobs: bool | None = Field(None, description="The log-probability of each token.")
    top_logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of this number of the most probable tokens at each place; needs logprobs."
    )
    tool_choice: ToolChoice | None = Field(None, description="none, auto, required, or one function by name.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="A variable of the chat template, such as low, high or max; none also sets enable_thinking to false.",
    )
    modalities: Annotated[list[Literal["text"]] | None, neutral("Text only.", max_length=1, min_length=1)] = None
    audio: Annotated[None, neutral("Text only.")] = None
    store: Annotated[bool | None, no_effect("Nothing is stored.")] = None
    prediction: Annotated[dict[str, Any] | None, no_effect("The engine makes its own drafts (speculative_config).")] = (
        None
    )
    functions: Annotated[None, neutral("Use tools.")] = None
    function_call: Annotated[Literal["none", "auto"] | None, neutral("Use tool_choice.")] = None
    web_search_options: Annotated[None, neutral("The server fetches nothing.")] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, no_effect("Ask for short or long answers in the messages.")
    ] = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="Text or token ids, or a list of them.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT, description="The most tokens of a completion; 16 if left out. 0 only with echo."
    )
    logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of each token and of this number of the most probable ones."
    )
    echo: bool | None = Field(None, description="The answer has the prompt before the completion, also in logprobs.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its special tokens to a text prompt; true if left out."
    )
    best_of: Annotated[int | None, neutral("Not supported: give n alone, or the same number.", ge=1, le=MAX_N)] = None
    suffix: str | None = Field(
        None, description="The text after the completion; only with a model that has fill-in-the-middle tokens."
    )


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: tokenises `prompt`, or `messages` as a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages, if left out.")
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(max_length=2**18)
    skip_special_tokens: bool | None = Field(None, description="False if left out.")
