"""Which call each result of a tool belongs to."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from inflight.entrypoints.ollama.results import name_calls

USER = {"role": "user", "content": "x"}


def calls(*names: str, first: int = 0) -> dict[str, Any]:
    """An answer with calls that have the ids 0, 1, ..."""
    made = [{"id": str(first + i), "function": {"name": name}} for i, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": "", "name": name, "tool_call_id": call_id}


def ids(*messages: dict[str, Any]) -> list[str | None]:
    named = [{**message} for message in messages]
    name_calls(named)
    return [message["tool_call_id"] for message in named if message["role"] == "tool"]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_names_and_ids_find_the_call_in_every_order(order: tuple[int, ...]) -> None:
    expected = [str(i) for i in order]
    assert ids(calls("f", "g", "h"), *(result("fgh"[i]) for i in order)) == expected
    assert ids(calls("f", "f", "f"), *(result(call_id=str(i)) for i in order)) == expected
    # one has an id, one a name, and the last one is what is left
    ways = [result(call_id="0"), result("g"), result()]
    assert ids(calls("f", "g", "h"), *(ways[i] for i in order)) == expected


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([calls("f", "g"), result(), result()], ["0", "1"]),
        ([calls("f", "f"), result("f"), result("f")], ["0", "1"]),
        ([calls("f", "g", "f"), result("f"), result("f"), result("g")], ["0", "2", "1"]),
        ([calls("f", "g"), result(call_id="1"), result()], ["1", "0"]),
        ([calls("f", "g"), result(), result(call_id="0")], ["1", "0"]),
        ([calls("f", "g"), result(call_id="other"), result()], ["other", "0"]),
        ([calls("f", "g"), result("odd"), result("f")], ["1", "0"]),
        ([calls("f"), result("odd")], ["0"]),
        ([calls("f"), result("f"), result("f")], ["0", None]),
        ([result("f")], [None]),
        ([USER, result(), calls("f"), result()], [None, "0"]),
        ([calls("f", "g"), result("g"), USER, result()], ["1", "0"]),
        ([calls("f"), USER, result("f")], ["0"]),
        ([calls("f"), USER, calls("f", first=1), result("f")], ["1"]),
        ([calls("f"), USER, calls("g", first=1), result(), result()], ["1", "0"]),
        ([calls("f"), USER, calls("g", first=1), result("f"), result("g")], ["0", "1"]),
        ([calls("f"), calls("g", first=1), result(), result()], ["0", "1"]),
        ([calls("f"), result(), calls("f", first=1), result()], ["0", "1"]),
    ],
)
def test_conversations(messages: list[dict[str, Any]], found: list[str | None]) -> None:
    assert ids(*messages) == found


class CountedName(str):
    """Counts how often names are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.num_compared += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@pytest.mark.parametrize("way", ["id", "name", "neither"])
def test_each_result_costs_the_same_whatever_the_number_of_calls(way: str) -> None:
    def num_compared(num_calls: int) -> int:
        names = [CountedName(f"f{i}") for i in range(num_calls)]
        asked: list[dict[str, Any]] = []
        for i, name in enumerate(names):
            call = {"id": CountedName(f"id{i}"), "function": {"name": name}}
            asked += [{"role": "assistant", "tool_calls": [call]}, {"role": "user"}]
        given: dict[str, Any] = {"id": {"tool_call_id": CountedName("x")}, "name": {"name": CountedName("x")}}.get(
            way, {}
        )
        messages = [*asked, *({"role": "tool", "tool_call_id": None, **given} for _ in range(num_calls))]
        CountedName.num_compared = 0
        name_calls(messages)
        assert way == "id" or None not in {message["tool_call_id"] for message in messages[-num_calls:]}
        return CountedName.num_compared

    assert num_compared(1000) < 20 * num_compared(100) + 1000
