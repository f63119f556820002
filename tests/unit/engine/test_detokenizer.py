"""`Detokenizer`: what is released, held back, cut and flushed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.detokenizer import Detokenizer
from inflight.engine.stop_strings import StopStrings
from inflight.sampling_params import SamplingParams
from tests.fakes_tokenizer import EOS, EOS_ID, byte_tokenizer


def make(**params: Any) -> Detokenizer:
    given = SamplingParams(**params)
    stop_strings = StopStrings(given.stop_strings) if given.stop_strings else None
    return Detokenizer(byte_tokenizer(), given, [65], stop_strings)


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
