"""An answer from the events of its parser."""

from __future__ import annotations

from inflight.entrypoints.written_answer import REASONING_FIELDS, WrittenAnswer, WrittenCall, written_answer
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart


def test_each_piece_goes_to_its_place() -> None:
    events: list[Event] = [
        ReasoningDelta("H"),
        ContentDelta("a"),
        ToolCallStart(0, "c0", "f"),
        ToolArgumentsDelta(0, "{"),
        ToolArgumentsDelta(0, "}"),
        ToolCallStart(1, "c1", "g"),
        ToolArgumentsDelta(1, "[]"),
        ContentDelta("b"),
        ReasoningDelta("m."),
    ]
    assert written_answer(events) == WrittenAnswer(
        "ab", "Hm.", [WrittenCall("c0", "f", "{}"), WrittenCall("c1", "g", "[]")]
    )
    assert written_answer([]) == WrittenAnswer()


def test_the_message_in_both_forms_of_openais_api() -> None:
    answer = WrittenAnswer("a", "Hm.", [WrittenCall("c0", "f", "{}")])
    function = {"name": "f", "arguments": "{}"}
    assert answer.as_message() == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "c0", "type": "function", "function": function}],
    }
    assert answer.as_message((), has_older_calls=True) == {
        "role": "assistant",
        "content": "a",
        "function_call": function,
    }
    both = WrittenAnswer("a", "Hm.").as_message(REASONING_FIELDS["both"])
    assert both == {"role": "assistant", "content": "a", "reasoning_content": "Hm.", "reasoning": "Hm."}
