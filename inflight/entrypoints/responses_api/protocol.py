"""`ResponsesRequest`: the body of a request to /v1/responses, as a pydantic model."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.sampling_fields import MAX_INT, MAX_PRIORITY, SamplingFields, sampling_field
from inflight.entrypoints.fields.strict_model import StrictModel, neutral, no_effect, optional
from inflight.entrypoints.fields.text_formats import TextFormats
from inflight.entrypoints.responses_api.items import InputItems
from inflight.entrypoints.responses_api.tools import ClientToolChoice, NamedTool, ResponseTools

LOGPROBS = "message.output_text.logprobs"  # a value of `include`


class TextOptions(TextFormats):
    verbosity: str | None = no_effect("Ask for short or long answers in the input.")


class EventOptions(StrictModel):
    include_obfuscation: bool | None = no_effect("The server adds no padding to events.")


class ResponsesRequest(ConstraintFields, SamplingFields):
    """POST /v1/responses"""

    model: str | None = optional("One of the names in /v1/models; the first of them if left out.")
    input: str | InputItems = Field(
        description="Text of the user, or items: the whole conversation, or what comes after `previous_response_id`."
    )
    instructions: str | None = optional("A system message before the input.")
    # tools
    tools: ResponseTools | None = optional("Tools the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ClientToolChoice | None = optional(
        "none, auto, required, or one tool by name."
    )
    parallel_tool_calls: bool | None = optional("False: at most one call.")
    # the answer
    max_output_tokens: int | None = optional("The most tokens of an answer.", ge=1, le=MAX_INT)
    text: TextOptions | None = optional("format: text, json_object or a json_schema.")
    top_logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of this number of the most probable tokens at each place of the text."
    )
    include: list[Annotated[str, Field(max_length=64)]] | None = optional(
        f"{LOGPROBS}: the log-probability of each token. Other values have no effect.", max_length=64
    )
    stream: bool | None = optional("Server-sent events, ended by [DONE].")
    stream_options: EventOptions | None = no_effect("The server adds no padding to events.")
    # how the request is run
    cache_salt: str | None = optional("Separates prefix caches of users.", max_length=1024)
    priority: int | None = optional(
        "Lower runs first; needs scheduling_policy='priority'.", ge=-MAX_PRIORITY, le=MAX_PRIORITY
    )
    # stored responses
    previous_response_id: str | None = optional(
        "The stored response whose conversation this one continues.", max_length=256
    )
    store: bool | None = optional("False: the response is not stored.")
    background: bool | None = optional("True: the answer comes at once, and the response goes on without its client.")
    conversation: None = neutral("Not supported, because no conversations are stored.")
    prompt: None = neutral("Not supported, because no prompts are stored.")
    # fields that change nothing
    truncation: Literal["auto", "disabled"] | None = no_effect("Nothing is left out: input that does not fit is a 400.")
    max_tool_calls: int | None = no_effect("A limit for tools that OpenAI's servers run.", ge=0, le=MAX_INT)
    metadata: dict[str, Any] | None = no_effect("Data of the caller, which the answer repeats.")
    client_metadata: dict[str, Any] | None = no_effect("Data of the caller.")
    user: str | None = no_effect("Data of the caller, which the answer repeats.")
    safety_identifier: str | None = no_effect("Data of the caller, which the answer repeats.")
    prompt_cache_key: str | None = no_effect("Equal prefixes are found without this field.")
    prompt_cache_retention: str | None = no_effect("The least recently used blocks are dropped first.")
    service_tier: str | None = no_effect("There is only one tier.")
