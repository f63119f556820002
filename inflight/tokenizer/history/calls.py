"""Calls and their results: which result belongs to which call."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from inflight.tokenizer.history.joining import with_text_before
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
    by_id: dict[object, dict[str, Any]] = {}
    waiting: dict[int, dict[str, Any]] = {}  # calls without a result, in their order; the keys are ids of Python
    by_name: dict[object, deque[dict[str, Any]]] = {}
    for message in conversation:
        for call in calls_of(message):
            by_id[_key(call.get("id"))] = waiting[id(call)] = call
            by_name.setdefault(_key(call["function"].get("name")), deque()).append(call)
        if message["role"] != "tool":
            continue
        if message.get("tool_call_id") is not None:
            found = by_id.get(_key(message["tool_call_id"]))
        else:
            named = by_name.get(_key(message.get("name")), deque())
            while named and id(named[0]) not in waiting:
                named.popleft()
            found = named[0] if named else next(iter(waiting.values()), None)
        if found is not None:
            waiting.pop(id(found), None)
        yield message, found


def _key(value: object) -> object:
    """A client's value as a key."""
    return value if isinstance(value, str) else repr(value)


def result_as_question(result: Message) -> dict[str, Any]:
    """The result of a tool as a message of the user, for templates that have no such role."""
    name = f" ({result['name']})" if result.get("name") else ""
    return {"role": "user", "content": with_text_before(f"Tool result{name}: ", result)}
