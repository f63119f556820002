"""`use_newer_fields`: a chat request in the words of OpenAI's older API, which had functions instead of tools."""

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.messages import NamedFunction, NamedToolChoice, Tool
from inflight.entrypoints.openai.protocol import ChatCompletionRequest


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
