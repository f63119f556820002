"""Server-sent events in pieces that the network cut anywhere."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inflight.event_buffer import EventBuffer


@given(
    st.lists(st.text("ab:d at\n", max_size=8), max_size=5),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_do_not_depend_on_how_they_are_cut(texts: list[str], cuts: list[int], newline: bytes) -> None:
    events = [text.encode() for text in texts]
    lines: list[bytes] = [b": a comment"]
    for event in events:
        lines += [b"data: " + line for line in event.split(b"\n")] + [b""]
    stream = newline.join([*lines, b""])
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    buffer = EventBuffer()
    pieces = [stream[low:high] for low, high in itertools.pairwise(bounds)]
    assert [event for piece in pieces for event in buffer.push(piece)] == events
