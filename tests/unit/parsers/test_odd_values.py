"""Values that come from a sign at the wrong place rather than from a model."""

from __future__ import annotations

import json

from inflight.parsers.odd_values import has_odd_key, has_odd_quote, has_odd_string, is_torn, lacks_bracket


def test_keys_and_typographic_quotes() -> None:
    assert not has_odd_key([{"a b": 1, "c.d-e": {"é": ":"}}])
    for key in ("a:", "a,b", "[a", "a// note", "a/* b */", "# a", "a\n"):
        assert has_odd_key([{"x": {key: 1}}])
    assert has_odd_quote({"a": ["“x"]}) and has_odd_quote({"“a": 1}) and not has_odd_quote({"a": "“x”"})


def test_texts_whose_quotes_are_not_the_models() -> None:
    for value, damaged in (
        ({"a": ",,"}, '{"a":"",,,"b"'),
        ({"a": "[] x"}, '{"a": [] x"}'),
        ({"a": 1, "7 b": 2}, '{"a": 1;7 b": 2}'),
        ({"a": "b c d"}, '{"a": b c d}'),
    ):
        assert has_odd_string(value, damaged)
        for ascii in (False, True):  # as the model has written it
            assert not has_odd_string(value, json.dumps(value, ensure_ascii=ascii))
    for value, damaged in (
        ({"a": "é b"}, '{"a": é b"}'),
        ({"a": "\u00e9 b", "c": 1}, '{"a": "\\u00e9 b, "c": 1}'),
        ({"a": "it's b"}, "{'a': 'it's b'}"),
        ({"a": "b"}, "{a: b}"),
    ):
        assert not has_odd_string(value, damaged), "one of the quotes is there, or it is a word"


def test_brackets_within_numbers_and_words() -> None:
    for before, behind in (("{1}", "2"), ("{1,}", "2"), ("[tru]", "e"), ("{a,}", "b")):
        assert is_torn(before, behind)
    for before, behind in (("{1}", ""), ("{1}", "\n"), ("{1}", "a"), ("{}", "1"), ('{"a"}', "b"), ("1, }", "2")):
        assert not is_torn(before, behind)
    assert lacks_bracket("a {x", "}") and not lacks_bracket("{x}", "}") and not lacks_bracket("x", ",")
