"""Invented conversations. Chat templates are rendered with them, to find out in which form they read messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError

Message = Mapping[str, Any]  # Any: JSON
# messages, tools -> prompt. It raises an `InvalidRequestError` if the template refuses the messages.
Render = Callable[[Sequence[Message], Sequence[Message]], str]

CALL_ID = "abcdefghi"  # Mistral's templates accept only ids of this length
NAME = "probe"
QUESTION: Message = {"role": "user", "content": "?"}


def a_tool(*arguments: str) -> Message:
    """A function with these integers as arguments."""
    properties = {name: {"type": "integer", "description": ""} for name in arguments}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}


def a_call(arguments: Mapping[str, Any] | str | None = None, call_id: str | None = CALL_ID) -> dict[str, Any]:
    """A message of the assistant with a call. `arguments` None: there are none. `call_id` None: the call has no id."""
    id_field = {} if call_id is None else {"id": call_id}
    made = {
        "type": "function",
        **id_field,
        "function": {"name": NAME, "arguments": {} if arguments is None else arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def a_result(content: object = "1", call_id: str | None = CALL_ID) -> dict[str, Any]:
    """The message with the result of a call."""
    id_field = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", "content": content, "name": NAME, **id_field}


def first_rendered(render: Render, conversations: Iterable[Sequence[Message]], tools: Sequence[Message]) -> str:
    """Returns the prompt of the first conversation that the template does not refuse; "" if it refuses all."""
    for conversation in conversations:
        try:
            return render(conversation, tools)
        except InvalidRequestError:
            continue
    return ""
