"""`Detokenizer`: what is released, held back, cut and flushed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.request.detokenizer import Detokenizer
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.reasoning import Opening
from inflight.parsers.selector import create_output_parser
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.stop_strings import StopStrings
from tests.support.fakes_tokenizer import EOS, EOS_ID, byte_tokenizer
from tests.unit.parsers.parser_cases import with_ids


def make(parser: OutputParser | None = None, **params: Any) -> Detokenizer:
    given = SamplingParams(**params)
    stop_strings = StopStrings(given.stop_strings) if given.stop_strings else None
    return Detokenizer(byte_tokenizer(), given, [65], stop_strings, parser)


def run(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], int]:
    """The text released by each token, then by the end; and how many tokens were taken."""
    released: list[str] = []
    for count, token_id in enumerate(ids, 1):
        if detokenizer.push([token_id]) is not None:
            detokenizer.finish()
            return [*released, detokenizer.take()], count
        released.append(detokenizer.take())
    detokenizer.finish()
    return [*released, detokenizer.take()], len(ids)


@given(st.lists(st.integers(0, 260)), st.booleans())
def test_without_stop_strings_it_is_the_decoded_text(ids: list[int], skip: bool) -> None:
    released, count = run(make(skip_special_tokens=skip), ids)
    assert "".join(released) == byte_tokenizer().decode(ids, skip_special_tokens=skip)
    assert count == len(ids)


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
def test_stop_strings(text: str, stop: list[str], min_tokens: int, include: bool) -> None:
    ids = list(text.encode())
    detokenizer = make(stop=stop, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include)
    released, count = run(detokenizer, ids)
    # the truth: after each token past min_tokens, does the whole text so far end in a stop string?
    for end in range(min_tokens + 1, len(ids) + 1):
        so_far = bytes(ids[:end]).decode("utf-8", "ignore")
        complete = so_far.encode() == bytes(ids[:end])
        found = [string for string in stop if complete and so_far.endswith(string)]
        if found:
            match = max(found, key=len)
            assert (detokenizer.stop_string, count) == (match, end)
            assert "".join(released) == (so_far if include else so_far.removesuffix(match))
            return
    assert (detokenizer.stop_string, count) == (None, len(ids))
    assert "".join(released) == text


@given(st.lists(st.integers(0, 260)), st.lists(st.text(alphabet="ab", min_size=1, max_size=2), max_size=2), st.data())
def test_how_tokens_are_cut_does_not_matter(ids: list[int], stop: list[str], data: st.DataObject) -> None:
    by_ones, count = run(make(stop=stop), ids)
    detokenizer = make(stop=stop)
    taken, left = 0, ids
    while left:
        size = data.draw(st.integers(1, len(left)))
        found = detokenizer.push(left[:size])
        taken += size if found is None else found
        left = [] if found is not None else left[size:]
    detokenizer.finish()
    assert (detokenizer.take(), taken) == ("".join(by_ones), count)


def test_only_what_could_begin_a_stop_string_is_held() -> None:
    released, _ = run(make(stop=["END", "EXIT"]), list(b"aEbENcENEXI"))
    assert released == ["a", "", "Eb", "", "", "ENc", "", "", "EN", "", "", "EXI"]


def test_a_token_may_hold_text_before_and_after_the_stop_string() -> None:
    detokenizer = make(stop=["<|us"], skip_special_tokens=False)
    assert detokenizer.push([ord("a")]) is None
    assert detokenizer.push([258, ord("b")]) == 1  # <|user|>
    detokenizer.finish()
    assert detokenizer.take() == "a"


def test_the_end_tokens_text() -> None:
    for include, skip, expected in ((False, False, "a"), (True, False, f"a{EOS}"), (True, True, "a")):
        detokenizer = make(include_stop_str_in_output=include, skip_special_tokens=skip)
        detokenizer.push([ord("a")])
        detokenizer.finish(EOS_ID)
        assert detokenizer.take() == expected


def test_an_incomplete_character_is_flushed() -> None:
    detokenizer = make(stop=["x"])
    detokenizer.push([0xC3])
    assert detokenizer.take() == ""
    detokenizer.finish()
    assert detokenizer.take() == "�"


def test_no_text_without_a_tokenizer_or_when_not_wanted() -> None:
    assert run(make(detokenize=False), [65, 66]) == (["", "", ""], 2)
    assert run(Detokenizer(None, SamplingParams(), [65], None), [65]) == (["", ""], 1)


# text, stop strings -> the events, the stop string that was found, and the text that was read up to it
CALL = '<tool_call>{"name": "f", "arguments": {"a": "END"}}</tool_call>'
CALLED: list[Event] = [ToolCallStart(0, "id", "f"), ToolArgumentsDelta(0, '{"a": "END"}')]
PARSED: list[tuple[str, list[str], list[Event], str | None, str]] = [
    ("<think>an END</think>to END it", ["END"], [ReasoningDelta("an END"), ContentDelta("to ")], "END", "to END"),
    ("<think>an END</think>to it", ["END"], [ReasoningDelta("an END"), ContentDelta("to it")], None, "to it"),
    (f"a {CALL} b END c", ["END"], [ContentDelta("a"), *CALLED, ContentDelta(" b ")], "END", " b END"),
    (f"E{CALL}ND", ["END"], [ContentDelta("E"), *CALLED, ContentDelta("ND")], None, "ND"),
    (f"a EN{CALL}", ["END", "</tool_call>"], [ContentDelta("a EN"), *CALLED], None, "</tool_call>"),
    (f"END{CALL}", ["END"], [], "END", "END"),
    ("a\n\nb", ["\n\n"], [ContentDelta("a")], "\n\n", "\n\nb"),  # white space waits for what follows
    (f"a\n\n{CALL}", ["\n\n"], [ContentDelta("a"), *CALLED], None, "</tool_call>"),
]


@pytest.mark.parametrize(("text", "stop", "expected", "found", "end"), PARSED)
def test_with_a_parser_stop_strings_end_the_content_only(
    text: str, stop: list[str], expected: list[Event], found: str | None, end: str
) -> None:
    def parser() -> OutputParser:
        return with_ids(create_output_parser("hermes", "qwen3", tools=[{"name": "f"}]), lambda: "id")

    detokenizer = make(parser(), stop=stop)
    ids = list(text.encode())
    count = detokenizer.push(ids)
    detokenizer.finish()
    assert detokenizer.take_events() == expected
    assert detokenizer.stop_string == found
    assert count == (None if found is None else text.index(end) + len(end))
    assert detokenizer.take() == ""
    if found is not None:
        included = make(parser(), stop=stop, include_stop_str_in_output=True)
        included.push(ids)
        included.finish()
        last = (included.take_events() or [])[-1]
        assert isinstance(last, ContentDelta) and last.text.endswith(found)
        late = make(parser(), stop=stop, min_tokens=len(ids), max_tokens=999)
        assert late.push(ids) is None


THOUGHTS = [
    ("<think>four</think>answer", len("four</think")),
    ("<think>cut", len("cut")),
    ("<think>cut </th", len("cut </th")),
    ("<think>a</think>so <think>bc</think>on<think>d</think>", len("a</think" + "bc</think" + "d</think")),
    # text, not reasoning
    ("<think>a</think>so <think>never closed", len("a</think")),
    ("<think>a</think>so `<think>b</think>`", len("a</think")),
    ("<think>a</think>so <think>text <think>bc</think>", len("a</think" + "bc</think")),
]


@pytest.mark.parametrize(("text", "expected"), THOUGHTS)
def test_the_token_that_completes_a_tag_is_no_reasoning_token(text: str, expected: int) -> None:
    """Each byte is a token. The end of the text adds none."""
    detokenizer = make(create_output_parser(None, "qwen3", tools=None))
    detokenizer.push(list(text.encode()))
    detokenizer.finish(is_cut=True)
    assert detokenizer.num_reasoning_tokens == expected


def test_there_are_no_more_reasoning_tokens_than_tokens() -> None:
    """Also where the prompt has opened the reasoning, and a character is incomplete at the end."""
    detokenizer = make(create_output_parser(None, "qwen3", tools=None, opening=Opening.OPEN))
    ids = list("né".encode())[:-1]
    detokenizer.push(ids)
    detokenizer.finish(is_cut=True)
    assert detokenizer.num_reasoning_tokens == len(ids)
