"""`name_calls`: finds out which call each result of a tool belongs to. In Ollama's API a result may have the id of its call, or
the name of the tool, or neither."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

RESULT = "tool"  # the role of a result


class _Call(NamedTuple):
    id: str
    name: str


def name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Set `tool_call_id` in each result that has none, to None if there is no call.

    Args:
        messages: the messages of a chat, whose calls all have ids.
    """
    waiting: list[_Call] = []  # the calls without a result, in the order in which results without a name belong to them
    is_asked_anew = False  # whether the user has written something since the last call
    for is_result, group in groupby(messages, lambda message: message["role"] == RESULT):
        together = list(group)
        if is_result:
            _name_calls(together, waiting)
            continue
        for message in together:
            is_asked_anew = is_asked_anew or message["role"] == "user"
            calls = [_Call(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
            # calls before the user's message have been given up, if there are newer ones
            waiting[:] = [*calls, *waiting] if is_asked_anew else [*waiting, *calls]
            is_asked_anew = is_asked_anew and not calls


def _name_calls(results: Iterable[dict[str, Any]], waiting: list[_Call]) -> None:
    """For results without other messages between them. Ids come before names, and names before the order. A name that is none
    of a waiting call's says nothing."""
    without_id = []
    for result in results:
        if result.get("tool_call_id") is None:
            without_id.append(result)
        else:
            waiting[:] = [call for call in waiting if call.id != result["tool_call_id"]]
    unnamed = []
    for result in without_id:
        named = next((call for call in waiting if call.name == result.get("name")), None)
        if named is None:
            unnamed.append(result)
        else:
            waiting.remove(named)
            result["tool_call_id"] = named.id
    for result in unnamed:
        result["tool_call_id"] = waiting.pop(0).id if waiting else None
