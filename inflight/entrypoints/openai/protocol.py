"""The bodies of requests to all endpoints, as pydantic models. /openapi.json is made from these models, too."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.fields.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    FunctionDefinition,
    NamedFunction,
    ToolChoice,
    Tools,
)
from inflight.entrypoints.fields.sampling_fields import MAX_INT, TokenId, sampling_field
from inflight.entrypoints.fields.strict_model import StrictModel, neutral, no_effect, optional
from inflight.entrypoints.openai.generation_fields import GenerationFields
from inflight.sampling_params import MAX_N

MAX_PROMPTS = 256  # per completion request
MAX_DOCUMENTS = 1024

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(StrictModel):
    """The fields that decide how messages become a prompt."""

    messages: Messages | None = optional("The conversation.")
    tools: Tools | None = optional("Functions the model may call. Tools of other types are left out, and reported.")
    add_generation_prompt: bool | None = optional(
        "Begin a message of the assistant; true if left out, except with continue_final_message."
    )
    continue_final_message: bool | None = optional("Continue the last message, and begin no new one.")
    chat_template: None = neutral("Not supported: --chat-template sets the server's.")
    chat_template_kwargs: dict[str, Any] | None = optional("Further variables of the template.")
    documents: list[dict[str, Any]] | None = optional(
        "Documents for the chat template, usually objects with title and text.", max_length=MAX_DOCUMENTS
    )
    mm_processor_kwargs: dict[str, Any] | None = optional(
        "Options of the model's processor of images, for this request."
    )
    add_special_tokens: bool | None = optional(
        "The tokenizer adds its special tokens; false if left out, because the template has them."
    )


class ChatCompletionRequest(ChatTemplateFields, GenerationFields):
    """POST /v1/chat/completions"""

    messages: Messages = Field(description="The conversation.")
    max_completion_tokens: int | None = optional(
        "The most tokens of an answer; -1 allows the whole context.", ge=-1, le=MAX_INT
    )
    max_tokens: int | None = optional(
        "Older name of max_completion_tokens, which comes first if the request has both.", ge=-1, le=MAX_INT
    )
    logprobs: bool | None = optional("The log-probability of each token.")
    top_logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of this number of the most probable tokens at each place; needs logprobs."
    )
    tool_choice: ToolChoice | None = optional("none, auto, required, or one function by name.")
    parallel_tool_calls: bool | None = optional("False: at most one call.")
    timings_per_token: bool | None = optional(
        "Every chunk of a stream has the timings so far (llama.cpp); the last chunk always has them."
    )
    return_progress: bool | None = optional(
        "A stream tells how many tokens of the prompt are computed, until the first token (llama.cpp)."
    )
    modalities: list[Literal["text"]] | None = neutral("Text only.", max_length=1, min_length=1)
    audio: None = neutral("Text only.")
    store: bool | None = no_effect("Nothing is stored.")
    prediction: dict[str, Any] | None = no_effect("The engine makes its own drafts (speculative_config).")
    functions: Annotated[list[FunctionDefinition], Field(fail_fast=True)] | None = optional(
        "Older name of tools. The answer has a function_call instead of tool_calls.", max_length=MAX_TOOLS
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = optional("Older name of tool_choice.")
    web_search_options: None = neutral("The server fetches nothing.")
    verbosity: str | None = no_effect("Ask for short or long answers in the messages.")


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="Text or token ids, or a list of them.")
    max_tokens: int | None = optional(
        "The most tokens of a completion; 16 if left out, -1 allows the whole context. 0 only with echo.",
        ge=-1,
        le=MAX_INT,
    )
    logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of each token and of this number of the most probable ones."
    )
    echo: bool | None = optional("The answer has the prompt before the completion, also in logprobs.")
    add_special_tokens: bool | None = optional(
        "The tokenizer adds its special tokens to a text prompt; true if left out."
    )
    best_of: int | None = neutral("Not supported: give n alone, or the same number.", ge=1, le=MAX_N)
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Only what they say about thoughts is read; there is no template."
    )
    suffix: str | None = optional(
        "The text after the completion; only with a model that has fill-in-the-middle tokens."
    )


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: tokenises `prompt`, or `messages` as a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = optional("True for a prompt, false for messages, if left out.")
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(max_length=2**18)
    skip_special_tokens: bool | None = optional("False if left out.")
