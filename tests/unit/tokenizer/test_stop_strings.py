"""`StopStrings` against a search that looks at every beginning of the text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.tokenizer.stop_strings import START, StopSearch, StopStrings

letters = st.text(alphabet="ab", max_size=40)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def all_matches(text: str, strings: list[str]) -> list[tuple[int, str]]:
    """Where each match ends, and the longest that ends there."""
    found = []
    for end in range(1, len(text) + 1):
        if ending := [string for string in strings if text[:end].endswith(string)]:
            found.append((end, max(ending, key=len)))
    return found


@given(letters, stops, st.lists(st.integers(1, 5)))
def test_finds_what_ends_first_however_the_text_is_cut(text: str, strings: list[str], sizes: list[int]) -> None:
    automaton = StopStrings(strings)
    state, done = START, 0
    found: tuple[int, str] | None = None
    for size in [*sizes, len(text)]:
        state, count, match = automaton.advance(state, text[done : done + size], search=True)
        done += count
        if match is not None:
            found = (done, match)
            break
        held = automaton.num_held[state]
        ends = [k for string in strings for k in range(1, len(string) + 1) if text[:done].endswith(string[:k])]
        assert held == max(ends, default=0)
    assert found == next(iter(all_matches(text, strings)), None)


@given(letters, stops, st.integers(0, 40))
def test_not_searching_reads_on(text: str, strings: list[str], start: int) -> None:
    automaton = StopStrings(strings)
    state, count, match = automaton.advance(START, text[:start], search=False)
    assert (count, match) == (len(text[:start]), None)
    _, count, match = automaton.advance(state, text[start:], search=True)
    expected = next((found for found in all_matches(text, strings) if found[0] > start), None)
    assert (None if match is None else (start + count, match)) == expected


def test_a_string_inside_the_beginning_of_another() -> None:
    automaton = StopStrings(["abcde", "bc", "c"])
    assert automaton.advance(START, "abcde", search=True)[1:] == (3, "bc")


def test_linear_where_a_naive_search_is_not() -> None:
    automaton = StopStrings(["a" * 1000 + "b"])
    start = time.thread_time()
    state = START
    for _ in range(20_000):
        state, _, match = automaton.advance(state, "aaaaa", search=True)
        assert match is None
    assert automaton.num_held[state] == 1000
    assert time.thread_time() - start < 5


@given(letters, stops, st.lists(st.integers(1, 5)), st.booleans())
def test_what_a_stream_shows(text: str, strings: list[str], sizes: list[int], includes_stop: bool) -> None:
    """All that is certain at once, and in the end the text up to the first stop string."""
    search = StopSearch(StopStrings(strings), includes_stop=includes_stop)
    shown, done = "", 0
    end, match = next(iter(all_matches(text, strings)), (len(text), None))
    for size in [*sizes, len(text)]:
        shown += search.write(text[done : done + size])
        done = min(done + size, len(text))
        if match is not None and done >= end:
            assert search.found == match
            assert shown == text[: end if includes_stop else end - len(match)]
        else:
            assert search.found is None
            begun = [k for string in strings for k in range(len(string)) if text[:done].endswith(string[:k])]
            assert shown == text[: done - max(begun)]
    held = search.release()
    assert shown + held == (text if match is None else text[: end if includes_stop else end - len(match)])


@pytest.mark.parametrize("includes_stop", [False, True])
def test_a_stop_string_may_begin_in_text_that_is_not_searched(includes_stop: bool) -> None:
    search = StopSearch(StopStrings(["END", "x"]), includes_stop=includes_stop)
    assert search.write("axbE", search=False) == "axb"
    assert search.write("NDc") == ("END" if includes_stop else "")
    assert search.found == "END"
    assert search.write("later") == search.release() == ""


def test_text_after_a_release_is_read_anew() -> None:
    search = StopSearch(StopStrings(["END"]))
    assert search.write("aEN") == "a"
    assert search.release() == "EN"
    assert search.write("Db") == "Db"
    assert search.found is None
    assert search.write("ENDc") == search.release() == ""
