"""How much white space is held. What the events are is in test_output_parser.py."""

from __future__ import annotations

import pytest

from inflight.interface.events import ContentDelta
from inflight.parsers import event_writer
from inflight.parsers.event_writer import EventWriter


@pytest.mark.parametrize("parts", [[" " * 4], [" "] * 4])
def test_at_most_so_much_white_space_is_held_also_a_second_time(
    monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    monkeypatch.setattr(event_writer, "MAX_HELD", 4)
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
