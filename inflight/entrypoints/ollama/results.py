"""`name_calls`: finds out which call each result of a tool belongs to. In Ollama's API a result may have the id of its call, or
the name of the tool, or neither."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

RESULT = "tool"  # the role of a result


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    is_answered: bool = False


class _WaitingCalls:
    """The calls without a result, in the order in which results without a name belong to them.

    A request may have thousands of calls and of results, so no result may cost a search through all calls. An answered call
    stays in a queue until it is the queue's first.
    """

    def __init__(self) -> None:
        self._all: deque[_Call] = deque()
        self._by_name: dict[str, deque[_Call]] = defaultdict(deque)
        self._by_id: dict[str, list[_Call]] = defaultdict(list)

    def add(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            self._all.append(call)
            self._by_name[call.name].append(call)
            self._by_id[call.id].append(call)

    def add_first(self, calls: Sequence[_Call]) -> None:
        """Add calls before those that are waiting already."""
        for call in reversed(calls):
            self._all.appendleft(call)
            self._by_name[call.name].appendleft(call)
            self._by_id[call.id].append(call)

    def answer(self, call_id: str) -> None:
        """There is a result with this id."""
        for call in self._by_id.pop(call_id, ()):
            call.is_answered = True

    def take(self, name: str | None = None) -> str | None:
        """The id of the first call, or of the first one with this name, which has its result now. None if there is none."""
        queue = self._all if name is None else self._by_name.get(name)
        while queue:
            call = queue.popleft()
            if not call.is_answered:
                call.is_answered = True
                return call.id
        return None


def name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Set `tool_call_id` in each result that has none, to None if there is no call.

    Args:
        messages: the messages of a chat, whose calls all have ids.
    """
    waiting = _WaitingCalls()
    is_asked_anew = False  # whether the user has written something since the last call
    for is_result, group in groupby(messages, lambda message: message["role"] == RESULT):
        together = list(group)
        if is_result:
            _name_calls(together, waiting)
            continue
        for message in together:
            is_asked_anew = is_asked_anew or message["role"] == "user"
            calls = [_Call(call["id"], _name(call)) for call in message.get("tool_calls", ())]
            # calls before the user's message have been given up, if there are newer ones
            if is_asked_anew:
                waiting.add_first(calls)
            else:
                waiting.add(calls)
            is_asked_anew = is_asked_anew and not calls


def _name_calls(results: Iterable[dict[str, Any]], waiting: _WaitingCalls) -> None:
    """For results without other messages between them. Ids come before names, and names before the order. A name that no
    waiting call has is ignored."""
    without_id = []
    for result in results:
        if result.get("tool_call_id") is None:
            without_id.append(result)
        else:
            waiting.answer(result["tool_call_id"])
    unnamed = []
    for result in without_id:
        name = result.get("name")
        result["tool_call_id"] = None if name is None else waiting.take(name)
        if result["tool_call_id"] is None:
            unnamed.append(result)
    for result in unnamed:
        result["tool_call_id"] = waiting.take()


def _name(call: dict[str, Any]) -> str:  # Any: JSON
    """A call of a type that the server does not know has no name."""
    function: dict[str, str] = call.get("function") or call.get("custom") or {"name": ""}
    return function["name"]
