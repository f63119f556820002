"""The items of `input` in a request to /v1/responses, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from inflight.entrypoints.fields.content_parts import PlainPart, is_part
from inflight.entrypoints.fields.messages import MAX_ARGUMENTS, MAX_MESSAGES, Role, ToolName, read_object, result_text
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional
from inflight.entrypoints.responses_api.client_tools import CALLS, OUTPUTS, ClientTool
from inflight.entrypoints.responses_api.tools import HistoryTools, type_of

REASONING_ID = "rs_"  # the ids of reasoning items begin with it
_THOUGHTS = ("reasoning_text", "summary_text", "text")
_FROM_CLIENT = "Data of the client or of an earlier answer."

Text = str | Annotated[list[PlainPart], Field(fail_fast=True)]
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
    output: Annotated[Text, BeforeValidator(result_text)] = Field(
        description="Text, parts with text, or any other JSON, which the model reads as text."
    )


class ClientCallItem(Item):
    """A call of a tool of OpenAI's that the client runs (`CLIENT_TOOLS`)."""

    type: Literal["tool_search_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str | None = optional("Its id, if left out.")
    action: dict[str, Any] | None = optional("The arguments of a shell.")
    operation: dict[str, Any] | None = optional("The arguments of apply_patch.")
    arguments: Any = optional("The arguments of tool_search, as a JSON object or as its text.")
    execution: str | None = optional("server: OpenAI's servers have searched, so that the call is left out.")
    environment: dict[str, Any] | None = no_effect(_FROM_CLIENT)
    caller: dict[str, Any] | None = no_effect(_FROM_CLIENT)
    created_by: str | None = no_effect(_FROM_CLIENT)

    @property
    def kind(self) -> ClientTool:
        return CALLS[self.type]

    @property
    def called_with(self) -> dict[str, Any]:
        """The arguments as the model has written them."""
        given = getattr(self, self.kind.member)
        if isinstance(given, str):
            given = read_object(given)
        return self.kind.arguments(given) if isinstance(given, dict) else {}


class ClientOutputItem(Item):
    """The result of such a call."""

    type: Literal["tool_search_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = optional("Its id, if left out.")
    output: Any = optional("Text, or JSON that the model reads as text.")
    tools: HistoryTools | None = optional("What tool_search has found: the model can call these tools from now on.")
    execution: str | None = optional("server: OpenAI's servers have searched, so that the result is left out.")
    max_output_length: int | None = no_effect(_FROM_CLIENT)
    caller: dict[str, Any] | None = no_effect(_FROM_CLIENT)
    created_by: str | None = no_effect(_FROM_CLIENT)

    @property
    def kind(self) -> ClientTool:
        return OUTPUTS[self.type]


class ReasoningPart(StrictModel):
    type: str = Field(max_length=256, description="reasoning_text, summary_text or text. Other parts are left out.")
    text: str | None = None


class ReasoningItem(Item):
    """The reasoning before a message or a call of the assistant. It is shown by templates that show reasoning."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] | None = optional("Used only if there is no content.")
    encrypted_content: str | None = no_effect("Only OpenAI can read it.")

    @property
    def unread(self) -> list[str]:
        """The types of parts with a text that is left out."""
        named = (("content", self.content), ("summary", self.summary))
        return [
            f"{name}[] ({part.type})" for name, parts in named for part in parts or () if part.type not in _THOUGHTS
        ]

    @property
    def text(self) -> str:
        parts = self.content or self.summary or ()
        return "\n\n".join(part.text for part in parts if part.text and part.type in _THOUGHTS)


class AdditionalToolsItem(Item):
    """Tools for this request, as in the field `tools`."""

    type: Literal["additional_tools"]
    tools: HistoryTools
    role: str | None = no_effect(_FROM_CLIENT)


class ItemReference(StrictModel):
    """An item that the client believes to be stored. A reference to reasoning is left out: @ai-sdk/openai sends one in a tool
    loop, unless it is told not to store, and a model can go on without its earlier reasoning."""

    type: Literal["item_reference"]
    id: str

    @property
    def is_of_reasoning(self) -> bool:
        return self.id.startswith(REASONING_ID)


class OtherItem(StrictModel):
    """An item of a type that the server does not know, such as a call that OpenAI's servers have made. It is left out, and so
    is the result of a call that is left out."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=256)
    call_id: Any = no_effect(_FROM_CLIENT)


_TAGS = {
    "custom_tool_call_output": "function_call_output",
    **dict.fromkeys(CALLS, "client call"),
    **dict.fromkeys(OUTPUTS, "client output"),
}
_KNOWN = frozenset(
    "message function_call custom_tool_call function_call_output reasoning additional_tools item_reference".split()
)


def _kind(item: object) -> str | None:
    kind = type_of(item)
    if kind is None:
        return "message"
    if not isinstance(kind, str):
        return None
    return kind if kind in _KNOWN else _TAGS.get(kind, "other")


def _as_message(item: object) -> object:
    """A part that is an item of its own is a message: of the assistant if a model has written it, or else of the user."""
    kind = type_of(item)
    if not isinstance(item, dict) or not isinstance(kind, str) or not is_part(kind):
        return item
    role = "assistant" if kind in ("output_text", "refusal") else "user"
    return {"type": "message", "role": role, "content": [item]}


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ClientCallItem, Tag("client call")]
    | Annotated[ClientOutputItem, Tag("client output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
    BeforeValidator(_as_message),
]
# with `instructions`, there is one message more
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
