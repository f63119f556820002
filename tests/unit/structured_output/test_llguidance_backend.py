"""What is llguidance's alone: forced spellings, limits, Lark, special tokens in structural tags, schemas it can express."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import time
from typing import Any

import numpy as np
import pytest
import tokenizers

from inflight.errors import ConfigError, InvalidRequestError
from inflight.structured_output.backend import GrammarBackend, GrammarMatcher, MaskJob, num_mask_words
from inflight.structured_output.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from inflight.structured_output.loader import load_backend
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes
from tests.support.fakes_tokenizer import trained
from tests.support.refusals import refused
from tests.support.schema_generator import texts
from tests.unit.structured_output.grammar_case import (
    POINT,
    allowed_ids,
    backend,
    mask_of,
    num_admitted,
    tokenizer,
    walk,
)

GRAMMAR = backend("embedded")
TOKENIZER = tokenizer("embedded")


def matcher_for(**constraint: Any) -> GrammarMatcher:
    return GRAMMAR.compile(GrammarSpec.from_params(StructuredOutputsParams(**constraint))).matcher()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def admits(text: str, **constraint: Any) -> bool:
    matcher = matcher_for(**constraint)
    return matcher.accept_tokens(encode(text)) == len(encode(text)) and matcher.is_accepting()


def test_where_one_text_is_admitted_its_own_spelling_is_forced() -> None:
    schema = {"type": "object", "properties": {"name": {"const": "Mia"}}, "required": ["name"]}
    schema |= {"additionalProperties": False}
    matcher = matcher_for(json=schema, disable_any_whitespace=True)
    text = '{"name":"Mia"}'
    forced = matcher.forced_tokens(limit=100)
    assert TOKENIZER.decode(forced) == text
    assert matcher.accept_tokens(forced) == len(forced)
    assert allowed_ids(mask_of(matcher, GRAMMAR)) == sorted(GRAMMAR.eos_token_ids)


BLOW_UPS = [
    "a{100000}",
    "a{1000000}",
    "(a?){500}a{500}",
    "(a?){5000}a{5000}",
    "([ab]{1,300}a){1,300}(b?){400}[ab]{400}c",
]


@pytest.mark.parametrize("regex", BLOW_UPS)
def test_a_regex_that_blows_up_fails_by_its_limits_within_a_second(regex: str) -> None:
    start = time.thread_time()
    try:
        matcher = matcher_for(regex=regex)
        token_ids = walk(matcher, GRAMMAR, random.Random(0), max_tokens=20, end=0.0)
        error = matcher.error()
        assert not error or set(mask_of(matcher, GRAMMAR)) == {-1}
        assert not error or (not matcher.accept(encode("a")[0]) and len(token_ids) < 20)
    except InvalidRequestError as refusal:
        error = str(refusal)
    assert "too" in error or regex == BLOW_UPS[-1]
    assert time.thread_time() - start < 1.0


def test_a_regex_may_blow_up_in_a_later_mask() -> None:
    bad = matcher_for(regex="((.{1,60} ){1,60}[a-z]{1,60}){1,60}x")
    good = matcher_for(choice=["yes", "no"])
    alone = mask_of(good, GRAMMAR)
    rng = random.Random(0)
    rows = np.zeros((2, num_mask_words(GRAMMAR.vocab_size)), dtype=np.int32)
    while bad.num_accepted < 200:
        GRAMMAR.fill_masks([MaskJob(bad, 0), MaskJob(good, 1)], rows)
        np.testing.assert_array_equal(rows[1], alone)
        if bad.error():
            break
        assert bad.accept(rng.choice(allowed_ids(rows[0])))
    assert "too complex" in bad.error()
    assert bad.num_accepted > 5
    assert set(rows[0]) == {-1}
    assert not good.error()


def test_a_matcher_that_fails_harms_no_other() -> None:
    bad = matcher_for(regex="a{100000}")
    good = matcher_for(choice=["yes", "no"])
    alone = mask_of(good, GRAMMAR)
    rows = np.zeros((5, num_mask_words(GRAMMAR.vocab_size)), dtype=np.int32)
    draft = encode("a")
    GRAMMAR.fill_masks([MaskJob(bad, 0, draft), MaskJob(good, 2), MaskJob(bad, 3, draft)], rows)
    assert "too" in bad.error()
    assert set(rows[[0, 1, 3, 4]].ravel()) == {-1}
    np.testing.assert_array_equal(rows[2], alone)
    assert not good.error()


def test_lark_with_an_own_start_and_imports() -> None:
    lark = 'start: "x" word+\nword: " " WORD\nWORD: /[a-z]+/\n'
    assert admits("x abc de", grammar=lark)
    assert not admits("x", grammar=lark)
    with pytest.raises(InvalidRequestError, match=r"grammar: .*missing"):
        matcher_for(grammar="start: missing")


def test_a_grammar_without_any_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="grammar: "):
        matcher_for(grammar="start: start")


def tag(begin: str, end: str, trigger: str) -> dict[str, Any]:
    structure = {"begin": begin, "schema": POINT, "end": end}
    return {"type": "structural_tag", "structures": [structure], "triggers": [trigger]}


def test_an_added_token_in_a_tag_may_come_as_token_or_as_text() -> None:
    spec = tag("<tool_call>", "</tool_call>", "<tool_call>")
    whole = encode('hi <tool_call>{"x":1}</tool_call> bye')
    assert 3 in whole  # the token, not its letters
    matcher = matcher_for(structural_tag=spec)
    assert matcher.accept_tokens(whole) == len(whole)
    assert matcher.is_accepting()
    spelled = [token_id for letter in "<tool_call>" for token_id in encode(letter)]
    matcher = matcher_for(structural_tag=spec)
    assert matcher.accept_tokens(spelled) == len(spelled)
    assert not matcher.is_accepting()
    assert not matcher.accept(encode("z")[0])


def test_a_special_token_in_a_tag_is_that_token() -> None:
    matcher = matcher_for(structural_tag=tag("<|im_start|>call ", "<|im_start|>", "<|im_start|>"))
    assert matcher.accept_tokens(encode("free <|im_star")) == len(encode("free <|im_star"))
    assert matcher.accept(1)
    assert not matcher.is_accepting()
    body = encode('call {"x":1}')
    assert matcher.accept_tokens(body) == len(body)
    assert allowed_ids(mask_of(matcher, GRAMMAR))[0] == 1
    assert matcher.accept(1)
    assert matcher.is_accepting()
    with refused("structural_tag"):
        matcher_for(structural_tag=tag("a<|im_start|>b", "", "a<|im_start|>"))


# each word is a state of the lexer of its own, which costs fuel
WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,29}\S+$", "maxLength": 300}


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_the_tokens_of_a_text_are_accepted_without_masks(num_drafts: int) -> None:
    """A resumed request accepts its tokens one after another, with a grammar that is compiled anew, and drafts are accepted in
    a row."""
    params = StructuredOutputsParams(json={"type": "object", "properties": {"a": WORDS}, "required": ["a"]})
    token_ids = encode('{"a": "the cat is red and Paul is happy today in Paris with a dog that runs over the hill')
    live = GRAMMAR.compile(GrammarSpec.from_params(params)).matcher()
    for token_id in token_ids:
        assert token_id in allowed_ids(mask_of(live, GRAMMAR))
        assert live.accept(token_id)
    resumed = GRAMMAR.compile(GrammarSpec.from_params(params)).matcher()
    for start in range(0, len(token_ids), max(num_drafts, 1)):
        drafts = token_ids[start : start + num_drafts]
        assert num_admitted(resumed, drafts) == len(drafts)
        rows = np.zeros((len(drafts) + 1, num_mask_words(GRAMMAR.vocab_size)), dtype=np.int32)
        if num_drafts:
            GRAMMAR.fill_masks([MaskJob(resumed, 0, drafts)], rows)
        assert resumed.accept_tokens(token_ids[start : start + max(num_drafts, 1)]) > 0, resumed.error()
    assert resumed.num_accepted == len(token_ids)
    np.testing.assert_array_equal(mask_of(resumed, GRAMMAR), mask_of(live, GRAMMAR))


class CountingMasks:
    """Counts the calls of `compute_bitmask` of the library's matcher."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.num_masks = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_bitmask(self) -> Any:
        self.num_masks += 1
        return self._inner.compute_bitmask()


def test_tokens_that_were_rolled_back_are_accepted_again_without_masks() -> None:
    matcher = matcher_for(regex="[a-z ]{1,100}")
    assert isinstance(matcher, LLGuidanceMatcher)
    matcher.inner = counting = CountingMasks(matcher.inner)
    token_ids = encode("the cat is red and happy today")
    assert matcher.accept_tokens(token_ids) == len(token_ids)
    assert counting.num_masks == len(token_ids) - 1  # the compilation has computed the first
    for num_tokens in (1, 2):  # one after the other
        matcher.rollback(num_tokens)
    assert matcher.accept_tokens(token_ids[-3:]) == 3
    assert counting.num_masks == len(token_ids) - 1


def test_a_mask_that_the_backend_has_filled_is_enough_for_the_next_token() -> None:
    matcher = matcher_for(regex="[a-z ]{1,100}")
    assert isinstance(matcher, LLGuidanceMatcher)
    first, *others = encode("the cat is red")
    assert matcher.accept(first)
    GRAMMAR.fill_masks([MaskJob(matcher, 0, [])], np.zeros((1, num_mask_words(GRAMMAR.vocab_size)), dtype=np.int32))
    matcher.inner = counting = CountingMasks(matcher.inner)
    assert matcher.accept(others[0])
    assert counting.num_masks == 0
    assert matcher.accept(others[1])
    assert counting.num_masks == 1


@functools.cache
def with_special_texts() -> tuple[Tokenizer, GrammarBackend, set[int]]:
    """TOKENIZER with three more tokens that are texts of markup, a backend for it, and the ids of all added tokens."""
    state = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    state.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in ("<think>", "<b>")])
    state.add_special_tokens([tokenizers.AddedToken("[THINK]", normalized=False)])
    ids = Tokenizer(state, {"eos_token": "<|im_end|>"})
    return ids, LLGuidanceBackend(ids, ids.vocab_size + 5, [2]), set(state.get_added_tokens_decoder())


def test_of_two_tokens_of_markup_the_longer_one_is_meant() -> None:
    state = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    state.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("[A]", "[A]b]")])
    ids = Tokenizer(state, {"eos_token": "<|im_end|>"})
    grammar = LLGuidanceBackend(ids, ids.vocab_size, [2])
    params = StructuredOutputsParams(structural_tag=tag("[f=", "[A]b]", "[f="))
    matcher = grammar.compile(GrammarSpec.from_params(params)).matcher()
    token_ids = ids.encode('[f={"x":1}[A]b]', add_special_tokens=False)
    assert token_ids[-1] == state.token_to_id("[A]b]")
    assert matcher.accept_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_a_token_that_was_rolled_back_is_forgotten_when_another_comes() -> None:
    """Only with a mask at its position it is certain that a token of the grammar is accepted."""
    matcher = matcher_for(regex="[a-z ]{1,100}")
    assert isinstance(matcher, LLGuidanceMatcher)
    first, second, third = (encode(letter)[0] for letter in "abc")
    assert matcher.accept_tokens([first, second]) == 2
    mask_of(matcher, GRAMMAR)
    matcher.inner = counting = CountingMasks(matcher.inner)
    assert matcher.accept(third)
    assert counting.num_masks == 0, "the mask was filled"
    matcher.rollback(2)
    assert matcher.accept_tokens([first, second, third]) == 3
    assert counting.num_masks == 3, "no token is the one that was there before"


@pytest.mark.parametrize(
    "text", ["<think>", "<tool_call>", "<b>", "[THINK]", "<|im_start|>", "<|im_end|>", "a<think>b"]
)
def test_the_text_of_a_special_token_is_spelled_with_ordinary_tokens(text: str) -> None:
    ids, grammar, added = with_special_texts()
    pieces = vocabulary_bytes(ids)
    for params, whole in (
        (StructuredOutputsParams(choice=[text, f"{text}!"]), text),
        (StructuredOutputsParams(json={"const": {"a": text}}), json.dumps({"a": text}).replace(" ", "")),
        (StructuredOutputsParams(structural_tag=tag("[f=", text, "[f=")), f'[f={{"x":1}}{text}'),
    ):
        if params.structural_tag and text in ("[THINK]", "<|im_start|>", "<|im_end|>"):
            continue  # in a structural tag such a text is the token
        matcher = grammar.compile(GrammarSpec.from_params(params)).matcher()
        written = b""
        while written != whole.encode():
            allowed = [t for t in allowed_ids(mask_of(matcher, grammar)) if t not in grammar.eos_token_ids]
            texts = {t: pieces[t] for t in allowed if t not in added}
            found = [t for t, piece in texts.items() if whole.encode()[len(written) :].startswith(piece)]
            assert found, (text, written)
            assert matcher.accept(found[-1])
            written += texts[found[-1]]
        assert matcher.is_accepting() or params.structural_tag


def test_a_trigger_binds() -> None:
    spec = tag("[f=dot>", "[/f]", "[f=")
    assert admits('a [f=dot>{"x": 1}[/f] b', structural_tag=spec)
    assert admits('a [f=dot>{"x":1}[/f]', structural_tag=spec, disable_any_whitespace=True)
    assert not admits('a [f=dot>{"x": 1}[/f]', structural_tag=spec, disable_any_whitespace=True)
    assert not admits("a [f=other>", structural_tag=spec)
    assert not admits("a [f=dot>", structural_tag=spec)
    assert admits("a [f", structural_tag=spec)


SCHEMAS: list[tuple[dict[str, Any], list[object], list[object]]] = [
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac", ""]),
    ({"type": "string", "pattern": r"^\d$"}, ["5"], ["५", "55"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 3}, [0.5, 2.75], [0.25, 3, -1]),
    ({"type": "integer", "multipleOf": 3}, [0, 9, -12], [1, 10]),
    ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, ["ab"], ["abc", 1]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [1.5, None]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}}, [[None, True]], [[True], [None, 1]]),
    ({"type": "object", "patternProperties": {"^a": {"const": 1}}, "additionalProperties": False}, [{"ab": 1}], [{"b": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"enum": [{"a": [1, None]}, "x"]}, [{"a": [1, None]}, "x"], [{"a": [1]}, "y"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_each_keyword_has_effect(schema: dict[str, Any], good: list[object], bad: list[object]) -> None:
    for value in good:
        assert admits(json.dumps(value, ensure_ascii=False), json=schema), value
    for value in bad:
        assert not admits(json.dumps(value, ensure_ascii=False), json=schema), value


def test_a_one_of_that_may_overlap_is_named() -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    with refused("json", "#/properties/a/oneOf"):
        matcher_for(json=schema)


DRAFT_4 = {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}
ELSEWHERE: list[tuple[dict[str, Any], str, str]] = [  # schema, a text that satisfies it, one that does not
    (DRAFT_4, "2", "1"),
    (DRAFT_4, "5", "6"),
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"ab"', '"a"'),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}}, "1", '"a"'),
    ({"$ref": "#/definitions/R%3Cs%3E", "definitions": {"R<s>": {"type": "integer"}}}, "1", '"a"'),
    ({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "type": "integer"}}}, "1", '"a"'),
    ({"$id": "https://x.y/z", "$ref": "https://x.y/z#/$defs/a", "$defs": {"a": {"type": "integer"}}}, "1", '"a"'),
    ({"$id": "https://x.y/z", "$ref": "w", "$defs": {"a": {"$id": "w", "type": "integer"}}}, "1", '"a"'),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ELSEWHERE)
def test_spellings_of_other_programs_are_enforced(schema: dict[str, Any], good: str, bad: str) -> None:
    assert admits(good, json=schema)
    assert not admits(bad, json=schema)


# schema, the place that the library cannot enforce with this value, a text that all of the rest admits, one that it does not
BY_VALUE: list[tuple[dict[str, Any], str, str, str]] = [
    ({"properties": {"e": {"type": "string", "pattern": "^(?!a)b"}}}, "#/properties/e/pattern", '{"e":"x"}', '{"e":1}'),
    ({"type": "string", "pattern": r"(a)\1", "maxLength": 2}, "#/pattern", '"xy"', '"xyz"'),
    ({"type": "string", "pattern": r"\bfoo"}, "#/pattern", '"x"', "1"),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "a$": {"type": "string"}}},
        "#/patternProperties",
        '{"aa":null}',
        "1",
    ),
    (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"type": "integer"}}},
        "#/patternProperties",
        '{"ab":1}',
        '{"ab":"x"}',
    ),
    ({"properties": {"a": {"type": "null"}}, "minProperties": 1}, "#/minProperties", '{"a":null}', '{"a":1}'),
    ({"type": "object", "minProperties": 2}, "#/minProperties", '{"a":1,"a":2}', "1"),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"const": 1}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        "#/minProperties",
        '{"ab":1,"ab":1}',
        '{"ab":2}',
    ),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", '{"b":1}', "1"),
]


@pytest.mark.parametrize(("schema", "place", "good", "bad"), BY_VALUE)
def test_a_value_that_the_library_cannot_enforce(schema: dict[str, Any], place: str, good: str, bad: str) -> None:
    """Not strict: left out and told, and all else is enforced. Strict: refused, with tool and keyword."""
    lenient = StructuredOutputsParams(json=schema, lenient=True)
    assert texts(GRAMMAR.relax(GrammarSpec.from_params(lenient))[1]) == [f"response_format: {place}"]
    assert admits(good, json=schema, lenient=True)
    assert not admits(bad, json=schema, lenient=True)
    with pytest.raises(InvalidRequestError, match=f"^json: {re.escape(place)}[: ]"):
        matcher_for(json=schema)
    for is_strict in (False, True):
        part = {"pointer": "#", "param": "tools[0]", "is_strict": is_strict, "function": "f"}
        spec = tag("<tool_call>", "</tool_call>", "<tool_call>")
        spec["structures"][0] |= {"schema": schema, "parts": [list(part.values())]}
        constraint = GrammarSpec.from_params(StructuredOutputsParams(structural_tag=spec))
        if is_strict:
            with pytest.raises(InvalidRequestError, match=rf"^tools\[0\] \('f'\): {re.escape(place)}[: ]"):
                GRAMMAR.compile(constraint)
        else:
            assert texts(GRAMMAR.relax(constraint)[1]) == [f"tools[0] ('f'): {place}"]
            GRAMMAR.compile(constraint)


def test_several_values_and_a_part_that_no_single_keyword_explains() -> None:
    patterns = {name: {"type": "string", "pattern": f"(?={name})"} for name in "abc"}
    params = StructuredOutputsParams(json={"type": "object", "properties": patterns}, lenient=True)
    told = texts(GRAMMAR.relax(GrammarSpec.from_params(params))[1])
    assert sorted(told) == [f"response_format: #/properties/{name}/pattern" for name in "abc"]
    both = {"type": "string", "pattern": "(?=a)", "allOf": [{"pattern": "(?=a)"}]}
    params = StructuredOutputsParams(json=both, lenient=True)
    assert texts(GRAMMAR.relax(GrammarSpec.from_params(params))[1])
    assert admits('"x"', json=both, lenient=True)


def test_whitespace_pattern() -> None:
    assert admits('[1,  2]', json={"type": "array"}, whitespace_pattern=" {2}")  # fmt: skip
    assert not admits("[1, 2]", json={"type": "array"}, whitespace_pattern=" {2}")
    with pytest.raises(InvalidRequestError, match=r"json: .*unclosed"):
        matcher_for(json={"type": "array"}, whitespace_pattern="(")


def test_a_tokenizer_without_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use this model's tokenizer"):
        LLGuidanceBackend(Tokenizer(trained("word_piece")), 400, [0])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_backend() is LLGuidanceBackend
    monkeypatch.delitem(sys.modules, "inflight.structured_output.llguidance_backend")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install 'llguidance'"):
        load_backend()


def test_a_model_without_an_eos_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="need a model with an EOS token"):
        LLGuidanceBackend(TOKENIZER, 1536, [])
