"""Calls in other forms: `function_call` and the role `function` of OpenAI's older API, and calls of custom tools.

Chat templates know only `tool_calls` of functions, and results of the role `tool`. So an older call gets an id, and its result
gets the same one. A custom tool, whose input is text, is a function with one argument.
"""

from collections.abc import Mapping
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.tokenizer.history.calls import calls_of, matched
from inflight.tokenizer.probes import Conversation, Message

INPUT = "input"  # the argument of a function that stands for a custom tool
_OLDER_CALL, _OLDER_RESULT = "function_call", "function"


def as_tool_calls(conversation: Conversation) -> Conversation:
    """The conversation with `tool_calls` and results of the role `tool` only.

    Raises:
        InvalidRequestError: a `function_call` is no object with a name.
    """
    found: Conversation = []
    results: set[int] = set()  # the places of results in the older form
    num_calls = 0
    for i, given in enumerate(conversation):
        message = given
        calls = given.get("tool_calls")
        if isinstance(calls, list) and any(map(_is_custom, calls)):
            message = {**message, "tool_calls": [_as_function(call) if _is_custom(call) else call for call in calls]}
        if _OLDER_CALL in message:
            message = _with_older_call(message, f"func{num_calls:05}", f"messages[{i}]['{_OLDER_CALL}']")
            num_calls += 1
        if message["role"] == _OLDER_RESULT:
            results.add(len(found))
            message = {**message, "role": "tool"}
        found.append(message)
    if results:
        by_message = {id(result): call for result, call in matched(found)}
        for place in results:
            call = by_message[id(found[place])]
            if found[place].get("tool_call_id") is None and call is not None and call.get("id") is not None:
                found[place]["tool_call_id"] = call["id"]
    return found


def _with_older_call(message: Message, call_id: str, where: str) -> dict[str, Any]:
    """The message with its `function_call` among its `tool_calls`. Some clients send the same call in both fields."""
    made = {key: value for key, value in message.items() if key != _OLDER_CALL}
    function = message[_OLDER_CALL]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} is {function!r}; it must be an object with 'name' and 'arguments'", where)
    calls = made.get("tool_calls") or []
    if function["name"] not in [call["function"].get("name") for call in calls_of(message)]:
        made["tool_calls"] = [*calls, {"id": call_id, "type": "function", "function": dict(function)}]
    return made


def _is_custom(call: object) -> bool:
    return isinstance(call, dict) and "function" not in call and isinstance(call.get("custom"), dict)


def _as_function(call: Message) -> dict[str, Any]:
    custom = call["custom"]
    function = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input") or ""}}
    return {**{key: value for key, value in call.items() if key != "custom"}, "type": "function", "function": function}
