"""Long strings are taken out of JSON before it is parsed, and the result is what Python's parser makes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.long_strings import LONG, take_long_strings
from inflight.entrypoints.http.strict_json import parse_json

URL = "data:image/png;base64," + "QUJD/+==" * (LONG // 4)
BASE64 = "x" * (3 * LONG + 7)
QUOTED = 'say "yes" ' * LONG


@pytest.mark.parametrize(
    ("value", "num_taken"),
    [
        ({"url": URL}, 1),
        ({"content": [{"image_url": {"url": URL}}, {"text": "a"}, {"image_url": URL}], "data": BASE64}, 3),
        ({"images": [BASE64, "short", URL, BASE64]}, 3),
        ({"emoji": "🙂", "url": URL}, 1),
        ({"prompt": "a " * LONG, "quoted": QUOTED}, 0),
        ({"numbers": list(range(LONG))}, 0),
    ],
    ids="value several list surrogates texts numbers".split(),
)
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b" " * LONG])
def test_long_strings_are_taken_out_and_put_back(value: Any, num_taken: int, begin: bytes) -> None:
    body = begin + json.dumps(value).encode()
    short, strings = take_long_strings(body)
    assert len(strings) == num_taken and (not num_taken or len(short) < len(begin) + LONG)
    assert parse_json(body) == parse_json(bytearray(body)) == value


@pytest.mark.parametrize(
    "value",
    [
        {BASE64: 1, "url": URL},  # a key is no value
        [[BASE64], {"a": [[URL]]}],  # deeper than any API has an image
        {"text": f'"{BASE64}"', "more": f"\\{URL}"},
        BASE64,
    ],
    ids="key nested quoted text".split(),
)
def test_what_is_no_value_of_an_object_is_parsed_as_it_is(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": "%s", }' % URL.encode(), f"line 1, column {len(URL) + 11}"),
        (b'{"a": "%s"' % URL.encode(), "column"),
        (b'{"a": "%s' % URL.encode(), "Unterminated"),
        (b'{"a": %s, "b": 1}' % (b"1" * (2 * LONG)), "too long"),
        (b'{"a": "%s", "a": 1}' % URL.encode(), "'a' twice"),
        (b'{"a": "%s", "b": "\xff"}' % URL.encode(), "not UTF-8"),
    ],
    ids="comma end string number repeated utf-8".split(),
)
def test_errors_are_those_of_the_whole(body: bytes, why: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(body)
    assert why in str(error.value.detail)


_LONG_TEXTS = st.builds(lambda text, count: text * (count // max(len(text), 1)), st.text("aA0/+\"\\ü ", min_size=1, max_size=3),
                        st.sampled_from([LONG - 1, LONG, LONG + 1, 2 * LONG + 5]))  # fmt: skip
_VALUES = st.recursive(
    st.one_of(st.text(max_size=5), _LONG_TEXTS, st.integers(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(_VALUES, st.booleans())
def test_any_json(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(body)
    except UnicodeDecodeError:
        return
    assert parse_json(body) == expected
