"""`ResponsesRequest`: the body of a request to /v1/responses, as a pydantic model."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.openai.generation_fields import MAX_INT, MAX_PRIORITY, SamplingFields, Schema, sampling_field
from inflight.entrypoints.openai.protocol import ReasoningEffort
from inflight.entrypoints.openai.strict_model import StrictModel, neutral, no_effect
from inflight.entrypoints.responses_api.items import InputItems
from inflight.entrypoints.responses_api.tools import NamedTool, ResponseTools

LOGPROBS = "message.output_text.logprobs"  # a value of `include`


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictModel):
    type: Literal["json_schema"]
    name: Annotated[str, no_effect("A name for the schema.", min_length=1, max_length=64)]
    schema_: Schema = Field(alias="schema", description="The JSON schema that the text satisfies.")
    description: Annotated[str | None, no_effect("What the schema is for. The model does not see it.")] = None
    strict: bool | None = Field(None, description="Refuse a schema if a part of it cannot be enforced.")


class TextOptions(StrictModel):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, no_effect("Ask for short or long answers in the input.")
    ] = None


class ReasoningOptions(StrictModel):
    effort: ReasoningEffort | None = Field(
        None,
        description="A variable of the chat template, such as low, high or max; none also sets enable_thinking to false.",
    )
    summary: Annotated[str | None, no_effect("The answer has the reasoning itself, and no summary.")] = None
    generate_summary: Annotated[str | None, no_effect("Older name of summary.")] = None
    context: Annotated[
        str | None, no_effect("The chat template decides which reasoning of earlier turns it shows.")
    ] = None


class EventOptions(StrictModel):
    include_obfuscation: Annotated[bool | None, no_effect("The server adds no padding to events.")] = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses"""

    model: str | None = Field(None, description="One of the names in /v1/models; the first of them if left out.")
    input: str | InputItems = Field(description="The whole conversation: text of the user, or items.")
    instructions: str | None = Field(None, description="A system message before the input.")
    # tools
    tools: ResponseTools | None = Field(None, description="Tools the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none, auto, required, or one tool by name."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    # the answer
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="The most tokens of an answer.")
    text: TextOptions | None = Field(None, description="format: text, json_object or a json_schema.")
    reasoning: ReasoningOptions | None = Field(None, description="effort: a variable of the chat template.")
    top_logprobs: int | None = sampling_field(
        "logprobs", "Log-probabilities of this number of the most probable tokens at each place of the text."
    )
    include: list[Annotated[str, Field(max_length=64)]] | None = Field(
        None, max_length=64, description=f"{LOGPROBS}: the log-probability of each token. Other values have no effect."
    )
    stream: bool | None = Field(None, description="Server-sent events, ended by [DONE].")
    stream_options: Annotated[EventOptions | None, no_effect("The server adds no padding to events.")] = None
    # how the request is run
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the template.")
    cache_salt: str | None = Field(None, max_length=1024, description="Separates prefix caches of users.")
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower runs first; needs scheduling_policy='priority'."
    )
    # nothing is stored
    previous_response_id: str | None = Field(None, description="A 404, because no responses are stored.")
    store: Annotated[bool | None, no_effect("Nothing is stored, and the answer says so.")] = None
    background: Annotated[Literal[False] | None, neutral("Not supported, because no responses are stored.")] = None
    conversation: Annotated[None, neutral("Not supported, because no conversations are stored.")] = None
    prompt: Annotated[None, neutral("Not supported, because no prompts are stored.")] = None
    # fields that change nothing
    truncation: Annotated[
        Literal["auto", "disabled"] | None, no_effect("Nothing is left out: input that does not fit is a 400.")
    ] = None
    max_tool_calls: Annotated[
        int | None, no_effect("A limit for tools that OpenAI's servers run.", ge=0, le=MAX_INT)
    ] = None
    metadata: Annotated[dict[str, Any] | None, no_effect("Data of the caller, which the answer repeats.")] = None
    client_metadata: Annotated[dict[str, Any] | None, no_effect("Data of the caller.")] = None
    user: Annotated[str | None, no_effect("Data of the caller, which the answer repeats.")] = None
    safety_identifier: Annotated[str | None, no_effect("Data of the caller, which the answer repeats.")] = None
    prompt_cache_key: Annotated[str | None, no_effect("Equal prefixes are found without this field.")] = None
    prompt_cache_retention: Annotated[str | None, no_effect("The least recently used blocks are dropped first.")] = None
    service_tier: Annotated[str | None, no_effect("There is only one tier.")] = None
