"""The tools that a chat offers to the model, and which of them it must call: also in the words of OpenAI's older API."""

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.messages import AnyTool, NamedFunction, NamedToolChoice, OtherTool, Tool
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, ChatTemplateFields
from inflight.parsers.tool_choice import ToolChoice


def keep_functions(body: ChatTemplateFields) -> list[str]:
    """Change the tools of the request: the server can offer only functions. Returns the names of the other tools, for the
    header of the answer."""
    others = [tool.type for tool in body.tools or () if isinstance(tool, OtherTool)]
    body.tools = functions_of(body.tools)
    return [f"tools[] ({kind})" for kind in others]


def functions_of(tools: list[AnyTool] | None) -> list[AnyTool] | None:
    return [tool for tool in tools if isinstance(tool, Tool)] or None if tools else None


def use_newer_fields(body: ChatCompletionRequest) -> None:
    """Change a request of the older API: `functions` and `function_call` become `tools` and `tool_choice`. That API has one
    call in an answer.

    Raises:
        FieldError: the request has the fields of both APIs, and they differ.
    """
    if body.functions and body.tools:
        if body.functions != [tool.function for tool in body.tools if isinstance(tool, Tool)]:
            raise FieldError("functions", "functions is the older name of tools, and they differ: give one of them")
        body.functions = None  # the client knows the newer API
    if body.functions:
        body.tools = [Tool(type="function", function=function) for function in body.functions]
        body.parallel_tool_calls = False
    if body.function_call is None:
        return
    choice = body.function_call
    newer = NamedToolChoice(type="function", function=choice) if isinstance(choice, NamedFunction) else choice
    if body.tool_choice not in (None, newer):
        raise FieldError(
            "function_call", "function_call is the older name of tool_choice, and they differ: give one of them"
        )
    body.tool_choice = newer


def tool_choice_of(body: ChatCompletionRequest, left_out: list[str]) -> ToolChoice:
    """What the parsers need to know. `left_out`: the names of the tools that the server cannot offer.

    Raises:
        FieldError: the choice asks for a call, but the function is not there.
    """
    field = "tool_choice" if body.function_call is None else "function_call"
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            have = "none that the server can offer, only " + ", ".join(left_out) if left_out else "no tools"
            raise FieldError(
                field, f"{field} asks for a call, but the request has {have}: add functions, or leave {field} out"
            )
        return "none"
    if not isinstance(choice, NamedToolChoice):
        return choice or "auto"
    name = choice.function.name
    if not any(isinstance(tool, Tool) and tool.function.name == name for tool in body.tools):
        raise FieldError(field, f"{field} names {name!r}, which is not one of the tools")
    return {"name": name}
