"""Lists that users give."""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequestError
from inflight.list_checks import as_tuple, check_strings, check_token_ids


def test_lists_become_tuples() -> None:
    assert as_tuple("stop", None) == ()
    assert as_tuple("stop", ["a", "b"]) == as_tuple("stop", iter("ab")) == as_tuple("stop", ("a", "b")) == ("a", "b")
    for value in ("ab", b"ab", {"a": 1}, 3):
        with pytest.raises(InvalidRequestError, match="is not a list"):
            as_tuple("stop", value)


def test_strings_have_a_largest_number_and_length() -> None:
    check_strings("stop", [], 0, 1)
    check_strings("stop", ["abc", "d"], 2, 3)
    for values, message in (
        (["a", "b", "c"], "3 strings; at most 2"),
        (["a", ""], "holds ''"),
        (["abcd"], "holds 'abcd'"),
        ([1], "holds 1"),
        ([b"a"], "holds b'a'"),
    ):
        with pytest.raises(InvalidRequestError, match=f"stop.*{message}"):
            check_strings("stop", values, 2, 3)


def test_token_ids_are_integers_from_zero() -> None:
    check_token_ids("stop_token_ids", [0, 7], 2)
    for values, message in (
        ([1, 2, 3], "3 token ids; at most 2"),
        ([-1], "holds -1"),
        ([True], "holds True"),
        (["1"], "holds '1'"),
        ([1.0], "holds 1.0"),
    ):
        with pytest.raises(InvalidRequestError, match=f"stop_token_ids.*{message}"):
            check_token_ids("stop_token_ids", values, 2)
