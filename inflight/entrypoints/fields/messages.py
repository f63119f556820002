"""The messages and tools of a chat request, as pydantic models and in the form that a chat template gets."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from inflight.entrypoints.fields.content_parts import ContentPart, TextPart, ThinkingPart
from inflight.entrypoints.fields.images import OtherPart
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional
from inflight.parsers.surrogates import without_lone_surrogates
from inflight.tokenizer.call_arguments import parse_object
from inflight.tokenizer.messages import RESULT_ROLES

MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_ARGUMENTS = 2**18  # characters per call
MAX_TOOL_NAME = 256  # characters
INVALID_JSON = "INVALID_JSON"
# the type of a tool or a tool_choice -> what an error says
INSTEAD_OF_TYPES = {
    "custom": "custom tools are not served: give a function with one parameter of type string",
    "allowed_tools": "allowed_tools is not served: send only these tools, with tool_choice auto or required",
    **dict.fromkeys(
        "web_search web_search_preview file_search code_interpreter computer_use_preview mcp image_generation".split(),
        "the server runs no tools: give a function that your program runs",
    ),
}
_NOT_SHOWN = {"refusal", "audio", "annotations"}  # fields that are accepted and not passed to templates

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]


Role = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]


def without_empty_list(arguments: object) -> object:
    """PHP writes an empty object as an empty list."""
    return {} if arguments == [] else arguments


class CalledFunction(StrictModel):
    name: ToolName
    arguments: Annotated[
        Annotated[str, Field(max_length=MAX_ARGUMENTS)] | dict[str, Any] | None, BeforeValidator(without_empty_list)
    ] = optional("A JSON object, usually as text. Text that is cut or malformed is accepted.")
    index: int | None = no_effect("Calls are in their order.")


class ToolCall(StrictModel):
    id: str | None = None
    type: str | None = optional("function, or left out.", max_length=256)
    function: CalledFunction
    index: int | None = no_effect("Clients that join the chunks of a stream may leave it in a call.")


class CustomInput(StrictModel):
    name: ToolName
    input: Annotated[str, Field(max_length=MAX_ARGUMENTS)] | None = optional("Text.")


class CustomCall(StrictModel):
    """A call of a custom tool, which another server has offered. The model sees the call of a function."""

    id: str | None = None
    type: Literal["custom"]
    custom: CustomInput
    index: int | None = no_effect("Clients that join the chunks of a stream may leave it in a call.")


class OtherCall(StrictModel):
    """A call of another type, such as one that another server has made. It is left out, and so is its result."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None)] = optional(
        "The id that its result names."
    )
    type: str = Field(max_length=256, json_schema_extra={"not": {"enum": ["function", "custom"]}})


def _kind_of_call(call: object) -> str:
    if isinstance(call, OtherCall):
        return "other call"
    kind = call.get("type") if isinstance(call, dict) else getattr(call, "type", None)
    has_function = call.get("function") is not None if isinstance(call, dict) else isinstance(call, ToolCall)
    if has_function or not isinstance(kind, str) or kind == "function":
        return "call of a function"
    return "call of a custom tool" if kind == "custom" else "other call"


AnyCall = Annotated[
    Annotated[ToolCall, Tag("call of a function")]
    | Annotated[CustomCall, Tag("call of a custom tool")]
    | Annotated[OtherCall, Tag("other call")],
    Discriminator(_kind_of_call),
]
Calls = Annotated[list[AnyCall], Field(fail_fast=True, max_length=MAX_TOOLS)]


def result_text(content: object) -> object:
    """The content of a tool's result. If it is JSON of another form than text and parts, it becomes text."""
    if content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content))):
        return content
    return json.dumps(content, ensure_ascii=False)


def _is_part(value: object) -> bool:
    return isinstance(value, StrictModel) or (isinstance(value, dict) and isinstance(value.get("type"), str))


class ChatMessage(StrictModel):
    """One message of a chat. A message from this server's answers may be sent back unchanged. The result of a tool may be any
    JSON."""

    role: Role = Field(
        description="developer has the same meaning as system. Names of other roles are passed to the chat template."
    )
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = optional(
        "The text; may be null in messages of the assistant and of tools."
    )
    name: str | None = optional("Used only by templates that show it.")
    tool_calls: Calls | None = optional("Calls that were made.")
    tool_call_id: str | None = optional("The id of the call whose result this message has.")
    reasoning_content: str | None = optional("Used only by templates that show it.")
    reasoning: str | None = optional("Newer name of reasoning_content.")
    function_call: CalledFunction | None = optional("A call in the older form. Its result has the role function.")
    refusal: str | None = optional("The text of a message of another model that has no content.")
    audio: dict[str, Any] | None = optional("Its transcript is the text of a message that has no content.")
    annotations: list[Any] | None = no_effect("From other models; templates do not see them.")

    @model_validator(mode="before")
    @classmethod
    def _read_result(cls, message: Any) -> Any:  # Any: JSON, not checked yet
        if isinstance(message, dict) and message.get("role") in RESULT_ROLES:
            return {**message, "content": result_text(message.get("content"))}
        return message

    @field_validator("content")
    @classmethod
    def _check_thoughts(
        cls, content: str | list[TextPart | ThinkingPart | OtherPart] | None, info: ValidationInfo
    ) -> str | list[TextPart | ThinkingPart | OtherPart] | None:
        has_thoughts = isinstance(content, list) and any(isinstance(part, ThinkingPart) for part in content)
        if has_thoughts and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError(
                "part_type", "a part of the type 'thinking' is read only in messages of the role 'assistant'"
            )
        return content

    @property
    def text(self) -> str:
        """The text of the content."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""


class FunctionDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of type object.")
    strict: bool | None = optional("Arguments are made to satisfy the schema.")


class Tool(StrictModel):
    type: Annotated[Literal["function"], BeforeValidator(lambda given: "function" if given is None else given)] = (
        optional("function, or left out.", default="function")
    )
    function: FunctionDefinition


class OtherTool(StrictModel):
    """A tool that is no function: a custom tool, or one that only another server runs. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=256, json_schema_extra={"not": {"const": "function"}})


def _kind_of_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if isinstance(kind, str) and kind != "function":
        return "other tool"
    return "tool with a function"


AnyTool = Annotated[
    Annotated[Tool, Tag("tool with a function")] | Annotated[OtherTool, Tag("other tool")], Discriminator(_kind_of_tool)
]
Tools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class NamedFunction(StrictModel):
    name: ToolName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages for the template, with only the fields that the request gives. The arguments of calls become objects,
    because templates write objects as JSON. Arguments that are not a JSON object stay text: the model may have made a mistake,
    or `max_tokens` may have cut them off."""
    return [_template_message(message) for message in messages]


def chat_message(
    role: str,
    content: str | Sequence[StrictModel] | None,
    *,
    tool_calls: Sequence[dict[str, Any]] = (),
    tool_call_id: str | None = None,
    reasoning_content: str | None = None,
) -> dict[str, Any]:
    """A message for the template, made of the parts of another API. `tool_calls`: made by `chat_call`."""
    shown: object = content
    if content is not None and not isinstance(content, str):
        shown = [part.model_dump(exclude_none=True) for part in content]
    given = {
        "role": _template_role(role),
        "content": shown,
        "tool_calls": list(tool_calls) or None,
        "tool_call_id": tool_call_id,
        "reasoning_content": reasoning_content,
    }
    return {name: value for name, value in given.items() if value is not None}


def chat_call(call_id: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call in a message for the template."""
    function = {"name": name, "arguments": _template_arguments(arguments)}
    return {**({} if call_id is None else {"id": call_id}), "type": "function", "function": function}


def chat_tool(
    name: str, *, description: str | None = None, parameters: dict[str, Any] | None = None, strict: bool | None = None
) -> dict[str, Any]:
    """A tool for the template. It has only the fields that are given, because a template writes all fields into the prompt."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {field: value for field, value in given.items() if value is not None}}


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of an answer's call, for an API in which they are an object. A text that is no object of JSON, because the
    model has made a mistake or was cut, becomes the only member, as Anthropic's documentation advises: nobody takes it for
    other arguments than the model has written."""
    found = read_object(text)
    if found is None:
        return {INVALID_JSON: text} if text.strip() else {}
    return found


def written_arguments(given: dict[str, Any]) -> dict[str, Any] | str:
    """The arguments of an earlier call as the model has written them: the reverse of `read_arguments`."""
    text = given.get(INVALID_JSON)
    return text if isinstance(text, str) and len(given) == 1 else given


def _template_message(message: ChatMessage) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude=_NOT_SHOWN)
    plain["role"] = _template_role(message.role)
    if isinstance(message.content, list):
        plain["content"] = [part.model_dump(exclude_none=True) for part in message.content]
    functions = [plain["function_call"]] if "function_call" in plain else []
    for call in plain.get("tool_calls", ()):
        call.pop("index", None)
        if "function" in call:
            call["type"] = "function"
            functions.append(call["function"])
    for function in functions:
        function.pop("index", None)
        function["arguments"] = _template_arguments(function.get("arguments"))
    return plain


def _template_role(role: str) -> str:
    return "system" if role == "developer" else role


def _template_arguments(given: str | dict[str, Any] | None) -> str | dict[str, Any]:
    arguments = written_arguments(given) if isinstance(given, dict) else given or {}
    if not isinstance(arguments, str):
        return arguments
    text = without_lone_surrogates(arguments)
    found = parse_object(text)
    return text if found is None else found


def read_object(text: str) -> dict[str, Any] | None:  # Any: JSON
    """The JSON object in `text`, or None if `text` is not a JSON object. NaN and infinite numbers are not JSON."""
    return parse_object(without_lone_surrogates(text))
