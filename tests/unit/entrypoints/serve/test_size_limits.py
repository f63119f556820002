"""How many bytes a body counts as when it is parsed. test_middlewares.py has the limits themselves."""

from __future__ import annotations

import json
import sys
import tracemalloc

import pytest

from inflight.entrypoints.serve import size_limits
from inflight.entrypoints.serve.size_limits import ParsedSize


def size(body: bytes, step: int = 1000) -> int:
    found = ParsedSize()
    for start in range(0, len(body), step):
        found = found.with_chunk(body[start : start + step])
    return found.num_bytes


TEXTS = {
    "ASCII": "x" * 40_000,
    "Latin": "\u00e9" * 20_000,
    "Greek": "x" * 40_000 + "\u03b1",
    "an emoji at the end": "x" * 40_000 + "\U0001f600",
    "emoji": "\U0001f600" * 10_000,
}


@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("step", [3, 10**6])
def test_a_text_counts_as_wide_as_its_widest_character(text: str, ensure_ascii: bool, step: int) -> None:
    body = json.dumps(text, ensure_ascii=ensure_ascii).encode()
    assert sys.getsizeof(json.loads(body)) <= size(body, step) + 100


def test_base64_is_not_searched_by_a_regular_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the event loop for milliseconds."""
    monkeypatch.setattr(size_limits, "re", None)
    monkeypatch.setattr(size_limits, "_WIDE_ESCAPE", None)
    body = json.dumps({"url": "data:image/png;base64," + "AbC+/0" * 50_000}).encode()
    assert size(body, 2**18) < len(body) + 100
    with pytest.raises(AttributeError):
        size(b'"\\u00e9"')


@pytest.mark.parametrize("item", ["[]", "{}", "0.5", '""', "[[[]]]", '{"a":{}}', "123456"])
def test_many_small_values_count_with_their_memory(item: str) -> None:
    body = ("[" + ",".join([item] * 20_000) + "]").encode()
    tracemalloc.start()
    try:
        parsed = json.loads(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(parsed) == 20_000 and taken <= 6 * size(body)


def test_plain_bodies_count_about_as_they_are() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3000} for _ in range(20)]}).encode()
    assert len(body) <= size(body) < 1.03 * len(body)
