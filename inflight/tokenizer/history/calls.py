"""Calls and their results: which result belongs to which call."""

from collections.abc import Iterator
from typing import Any

from inflight.tokenizer.history.joining import text_of
from inflight.tokenizer.probes import Conversation, Message


def calls_of(message: Message) -> list[dict[str, Any]]:  # Any: JSON
    """The calls of a message that have a function."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [call for call in calls if has_function(call)]


def has_function(call: object) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def has_calls(conversation: Conversation) -> bool:
    return any(message.get("tool_calls") or message["role"] == "tool" for message in conversation)


def matched(conversation: Conversation) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each result with its call; None if it has none. A result with an id belongs to the last call with this id. A result
    without an id belongs to the first call that waits for a result, and that has the name of the result if this has one."""
    waiting: list[dict[str, Any]] = []
    answered: dict[str, dict[str, Any]] = {}
    for message in conversation:
        waiting += calls_of(message)
        if message["role"] != "tool":
            continue
        found = _call_of(message, waiting)
        if found is not None:
            waiting = [call for call in waiting if call is not found]
            answered[str(found.get("id"))] = found
        elif "tool_call_id" in message:  # a second result of one call
            found = answered.get(str(message["tool_call_id"]))
        yield message, found


def _call_of(result: Message, waiting: list[dict[str, Any]]) -> dict[str, Any] | None:
    call_id, name = result.get("tool_call_id"), result.get("name")
    if call_id is not None:
        return next((call for call in reversed(waiting) if call.get("id") == call_id), None)
    nameless = [call for call in waiting if name is None or call["function"].get("name") == name]
    return next(iter(nameless or waiting), None)


def waiting_calls(conversation: Conversation) -> list[dict[str, Any]]:
    """The calls of the last messages that have no result."""
    start = len(conversation)
    while start and (conversation[start - 1].get("tool_calls") or conversation[start - 1]["role"] == "tool"):
        start -= 1
    turn = conversation[start:]
    answered = [id(call) for _, call in matched(turn)]
    return [call for message in turn for call in calls_of(message) if id(call) not in answered]


def result_as_question(result: Message) -> dict[str, Any]:
    """The result of a tool as a message of the user, for templates that have no such role."""
    name = f" ({result['name']})" if result.get("name") else ""
    return {"role": "user", "content": f"Tool result{name}: {text_of(result)}"}
