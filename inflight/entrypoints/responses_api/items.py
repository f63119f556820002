"""The items of `input` in a request to /v1/responses, as pydantic models."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from inflight.entrypoints.openai.messages import MAX_ARGUMENTS, MAX_MESSAGES, Role, TextPart, ToolName, as_text_part
from inflight.entrypoints.openai.strict_model import StrictModel, no_effect, optional
from inflight.entrypoints.responses_api.tools import ResponseTools, type_of

REASONING_ID = "rs_"  # the ids of reasoning items begin with it
_FROM_CLIENT = "Data of the client or of an earlier answer."
_ServerCall = Literal["web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"]

Text = str | Annotated[list[Annotated[TextPart, BeforeValidator(as_text_part)]], Field(fail_fast=True)]
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS)]


class Item(StrictModel):
    id: str | None = no_effect(_FROM_CLIENT)
    status: str | None = no_effect(_FROM_CLIENT)


class MessageItem(Item):
    """A message, also without a `type`."""

    type: Literal["message"] | None = None
    role: Role = Field(description="user, assistant, system, developer, or another role of the chat template.")
    content: Text = Field(description="The text, or parts with text.")
    phase: str | None = no_effect(_FROM_CLIENT)


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    namespace: str | None = None
    arguments: Arguments = Field(description="A JSON object as text. Text that is cut or malformed is accepted.")


class CustomToolCallItem(Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: ToolName
    namespace: str | None = None
    input: Arguments


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Text


class ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Item):
    """The reasoning before a message or a call of the assistant. It is shown by templates that show reasoning."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] | None = optional("Used only if there is no content.")
    encrypted_content: str | None = no_effect("Only OpenAI can read it.")

    @property
    def text(self) -> str:
        return "\n\n".join(part.text for part in self.content or self.summary or ())


class AdditionalToolsItem(Item):
    """Tools for this request, as in the field `tools`."""

    type: Literal["additional_tools"]
    tools: ResponseTools
    role: str | None = no_effect(_FROM_CLIENT)


class ItemReference(StrictModel):
    """An item that the client believes to be stored. A reference to reasoning is left out: @ai-sdk/openai sends one in a tool
    loop, unless it is told not to store, and a model can go on without its earlier reasoning."""

    type: Literal["item_reference"]
    id: str

    @property
    def is_of_reasoning(self) -> bool:
        return self.id.startswith(REASONING_ID)


class ServerCallItem(StrictModel):
    """A call that OpenAI's servers have made. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: _ServerCall


_TAGS = {"custom_tool_call_output": "function_call_output", **dict.fromkeys(get_args(_ServerCall), "web_search_call")}


def _kind(item: object) -> str | None:
    kind = type_of(item)
    if kind is None:
        return "message"
    return _TAGS.get(kind, kind) if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ServerCallItem, Tag("web_search_call")],
    Discriminator(_kind),
]
# with `instructions`, there is one message more
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
