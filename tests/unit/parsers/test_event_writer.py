"""How much white space is held, and stop strings in content. What the events are is in test_output_parser.py."""

from __future__ import annotations

import pytest

from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers import event_writer
from inflight.parsers.event_writer import EventWriter
from inflight.tokenizer.stop_strings import StopSearch, StopStrings


@pytest.mark.parametrize("parts", [[" " * 4], [" "] * 4])
def test_at_most_so_much_white_space_is_held_also_a_second_time(
    monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    monkeypatch.setattr(event_writer, "MAX_BUFFERED", 4)
    writer = EventWriter(lambda: "", None, keeps_blanks=True)

    def shown(text: str) -> str:
        writer.content(text)
        return "".join(event.text for event in writer.take_events() if isinstance(event, ContentDelta))

    assert shown("a") == "a"
    for _ in range(2):
        assert [shown(part) for part in parts] == [""] * len(parts)
        assert shown("b") == "    b"
    assert [shown(part) for part in parts] == [""] * len(parts)
    assert shown(" ") == "     ", "one more than may be held"


def stopping(max_tool_calls: int | None = None) -> EventWriter:
    writer = EventWriter(lambda: "id", max_tool_calls, keeps_blanks=True)
    writer.stop_search = StopSearch(StopStrings(["END"]))
    return writer


def test_nothing_comes_after_a_stop_string() -> None:
    writer = stopping()
    writer.content("aENDb")
    writer.content("c")
    writer.reasoning("d")
    writer.start_call("f")
    writer.arguments("{}")
    writer.end_call()
    writer.content("e")
    writer.finish()
    assert writer.take_events() == [ContentDelta("a")]
    assert writer.num_tool_calls == 0


def test_what_may_begin_a_stop_string_waits() -> None:
    writer = stopping()
    writer.begin_reasoning()
    writer.reasoning("thENDis")
    writer.end_reasoning()
    writer.content("aE")
    assert writer.take_events() == [ReasoningDelta("thENDis"), ContentDelta("a")]
    writer.content("N")
    assert writer.take_events() == []
    writer.content("b")
    assert writer.take_events() == [ContentDelta("ENb")]
    writer.may_stop = False
    writer.content("ENDc")
    assert writer.take_events() == [ContentDelta("ENDc")]
    writer.content("E")
    writer.finish()
    assert writer.take_events() == [ContentDelta("E")]


def test_a_call_ends_the_content_before_it() -> None:
    """So what was held is no stop string, and one cannot go on behind the call."""
    writer = stopping(max_tool_calls=1)
    writer.content("aEN")
    for _ in range(2):
        writer.hold("<call>")
        writer.start_call("f")
        writer.arguments("")
        writer.arguments("{}")
        writer.end_call()
        writer.content("D")
    events: list[Event] = [
        ContentDelta("a"),
        ContentDelta("EN"),
        ToolCallStart(0, "id", "f"),
        ToolArgumentsDelta(0, "{}"),
    ]
    assert "".join(each.text for each in writer.take_events() if isinstance(each, ContentDelta)) == "aENDD"
    writer = stopping()
    writer.content("aEN")
    writer.start_call("f")
    writer.arguments("{}")
    assert writer.take_events() == [ContentDelta("aEN"), *events[2:]]


def test_held_text_becomes_content_or_is_dropped() -> None:
    writer = stopping()
    writer.hold("<ca")
    writer.hold("")
    writer.hold("ll>")
    writer.reject()
    assert writer.take_events() == [ContentDelta("<call>")]
    writer.hold("</call>")
    writer.cut()  # no call is open
    writer.finish()
    assert writer.take_events() == [ContentDelta("</call>")]
    writer = stopping()
    writer.start_call("f")
    writer.hold("</cal")
    writer.cut()
    writer.finish()
    assert writer.take_events() == [ToolCallStart(0, "id", "f")]
    writer.drops_content = True
    writer.content("dropped")
    assert writer.take_events() == []
