"""The tools that a chat offers to the model, and which of them it must call."""

from collections.abc import Sequence
from typing import Any

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import AnyTool, NamedToolChoice, OtherTool, Tool
from inflight.entrypoints.fields.messages import ToolChoice as GivenChoice
from inflight.parsers.tool_choice import ToolChoice


def keep_functions(tools: Sequence[AnyTool] | None) -> tuple[list[AnyTool] | None, list[str]]:
    """Returns the tools that the server can offer, which are functions, or None; and the names of the others, for the header of
    the answer."""
    given = tools or ()
    return [tool for tool in given if isinstance(tool, Tool)] or None, [
        f"tools[] ({tool.type})" for tool in given if isinstance(tool, OtherTool)
    ]


def places_of_functions(tools: Sequence[AnyTool] | None) -> list[str]:
    """The fields of the tools that `keep_functions` keeps."""
    return [f"tools[{i}]" for i, tool in enumerate(tools or ()) if isinstance(tool, Tool)]


def plain_tools(tools: Sequence[AnyTool] | None) -> list[dict[str, Any]]:  # Any: JSON
    """The tools as JSON objects. They contain only the fields that the request gave, because a template writes all fields into
    the prompt."""
    return [tool.model_dump(exclude_unset=True) for tool in tools or ()]


def neutral_choice(given: GivenChoice | None) -> ToolChoice | None:
    if not isinstance(given, NamedToolChoice):
        return given
    return {"name": given.function.name}


def tool_choice_of(
    tools: Sequence[dict[str, Any]], choice: ToolChoice | None, left_out: Sequence[str] = (), field: str = "tool_choice"
) -> ToolChoice:
    """The choice of a chat with these tools.

    Args:
        left_out: the names of the tools that the server cannot offer.
        field: the field of the request that has the choice.

    Raises:
        FieldError: the choice asks for a call, but the function is not there.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            have = "none that the server can offer, only " + ", ".join(left_out) if left_out else "no tools"
            raise FieldError(
                field, f"{field} asks for a call, but the request has {have}: add functions, or leave {field} out"
            )
        return "none"
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    name = choice["name"]
    if not any(tool["function"]["name"] == name for tool in tools):
        raise FieldError(field, f"{field} names {name!r}, which is not one of the tools")
    return choice
