r"""Lone surrogates in JSON become U+FFFD, however the JSON is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest

from inflight.interface.events import ToolArgumentsDelta
from inflight.parsers.event_writer import EventWriter
from inflight.parsers.surrogates import SurrogateFilter, without_lone_surrogates

HIGH, LOW = r"\ud83d", r"\ude42"
CASES = {
    HIGH + LOW: HIGH + LOW,
    HIGH.upper().replace("U", "u") + LOW: r"\uD83D" + LOW,
    HIGH: r"\ufffd",
    LOW: r"\ufffd",
    LOW + HIGH: r"\ufffd\ufffd",
    HIGH + HIGH + LOW: r"\ufffd" + HIGH + LOW,
    HIGH + "x" + LOW: r"\ufffdx\ufffd",
    HIGH + r"\n": r"\ufffd\n",
    HIGH + r"\u0041": r"\ufffd\u0041",
    r"\ud7ff\ue000": r"\ud7ff\ue000",
    # an escaped backslash, and plain text behind it
    "\\" + HIGH: "\\" + HIGH,
    "\\\\" + HIGH: r"\\\ufffd",
    "\ud83d!": "\ufffd!",
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_halves_without_the_other_half_are_replaced(text: str, expected: str) -> None:
    assert without_lone_surrogates(text) == expected
    assert json.loads(f'"{without_lone_surrogates(text)}"').encode("utf-8")


def test_all_cuts_give_the_same_text() -> None:
    rng = random.Random(0)
    parts = [HIGH, LOW, HIGH[:-1], "\\u", "\\\\", '\\"', "d", "8", "\\n", "é", "\\u00e9", "\udc00"]
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(8)))
        filtered, written, rest = SurrogateFilter(), "", text
        while rest:
            cut = rng.randrange(1, len(rest) + 1)
            written, rest = written + filtered.write(rest[:cut]), rest[cut:]
        assert written + filtered.finish() == without_lone_surrogates(text)


def test_no_more_is_held_than_an_escape_needs() -> None:
    filtered = SurrogateFilter()
    written = [filtered.write(piece) for piece in ("a", "\\", "ud8", "3d", "\\u", "0041")]
    assert written == ["a", "", "", "", "", r"\ufffd\u0041"]
    assert filtered.write("\\n") == "\\n"


def test_calls_have_no_lone_surrogates() -> None:
    writer = EventWriter(lambda: "id", None)
    writer.start_call("f")
    for piece in ('{"a": "x', "\\ud9", "9c", ' y", "b": "', HIGH, LOW, '", "c": "', HIGH):
        writer.arguments(piece)
    writer.start_call("g")
    writer.arguments(HIGH)
    writer.finish()
    found: dict[int, str] = {}
    for event in writer.take_events():
        if isinstance(event, ToolArgumentsDelta):
            found[event.index] = found.get(event.index, "") + event.text
    assert found == {0: rf'{{"a": "x\ufffd y", "b": "{HIGH}{LOW}", "c": "\ufffd', 1: r"\ufffd"}
