"""Which texts a structural tag admits: tags only, something else instead of tags, objects between tags, special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.refusals import refused
from tests.unit.structured_output.grammar_case import POINT, backend, tokenizer

GRAMMAR = backend("embedded")
TOKENIZER = tokenizer("embedded")


class Admits:
    """Whether the texts of a structural tag are admitted; compiled once.

    `letters`: each text comes letter by letter, so without the tokens of markup.
    """

    def __init__(self, tag: dict[str, Any], **options: Any) -> None:
        params = StructuredOutputsParams(structural_tag={"type": "structural_tag", **tag}, **options)
        self._compiled = GRAMMAR.compile(GrammarSpec.from_params(params))

    def __call__(self, text: str, *, letters: bool = False) -> bool:
        parts = list(text) if letters else [text]
        token_ids = [token_id for part in parts for token_id in TOKENIZER.encode(part, add_special_tokens=False)]
        matcher = self._compiled.matcher()
        return matcher.accept_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def which(self, texts: Sequence[str]) -> list[str]:
        return [text for text in texts if self(text)]


DOT, PAIR, POST = '[f=dot>{"x": 1}[/f]', '[g=pair>[{"x": 1}]{/g}', 'post {"x": 2}!'
STRUCTURES = [
    {"begin": "[f=dot>", "schema": POINT, "end": "[/f]"},
    {"begin": "[g=pair>", "schema": {"type": "array", "items": POINT}, "end": "{/g}"},
]
OTHERWISE = {"begin": "post ", "schema": POINT, "end": "!"}
# whole texts, none of which is admitted by all of the settings below
ONE = [DOT, PAIR]
SEVERAL = [f"{DOT}, {PAIR}", f"{PAIR}, {DOT}, {DOT}"]
PLAIN = ["", "hi", POST, "post [1]!"]
OPENED = ["a [f=", "a [g= b"]
LATER = [f"a {DOT}", f", {DOT}"]
BEGUN = [f"{DOT}, ", f"{DOT} a", f"{DOT}{PAIR}"]
WRONG = ["[f=", " \n[g=", "[f=dot>[1][/f]", '[g=pair>{"x": 1}{/g}', '[f=pair>[{"x": 1}]{/g}']
SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"separator": ", "}, [*ONE, *SEVERAL, *PLAIN, *OPENED, *LATER]),
    ({"separator": ", ", "at_least_one": True}, [*ONE, *SEVERAL]),
    ({"separator": ", ", "stop_after_first": True}, [*ONE, *PLAIN, *OPENED, *LATER]),
    ({"separator": ", ", "at_least_one": True, "stop_after_first": True}, ONE),
    ({"separator": ", ", "otherwise": OTHERWISE}, [*ONE, *SEVERAL, POST]),
    ({"separator": ", ", "otherwise": OTHERWISE, "stop_after_first": True}, [*ONE, POST]),
    ({}, [*ONE, *SEVERAL, *PLAIN, *LATER, *BEGUN]),
    ({"stop_after_first": True}, [*ONE, *PLAIN, *LATER]),
]


@pytest.mark.parametrize(("setting", "admitted"), SETTINGS)
def test_what_stands_around_tags(setting: dict[str, Any], admitted: list[str]) -> None:
    admits = Admits({"structures": STRUCTURES, "triggers": ["[f=", "[g="], **setting})
    texts = [*ONE, *SEVERAL, *PLAIN, *OPENED, *LATER, *BEGUN, *WRONG]
    assert sorted(admits.which(texts)) == sorted(admitted)


def test_a_schema_that_is_true_or_false() -> None:
    tag = {"begin": "[a]", "schema": True, "end": "!"}
    rest: dict[str, Any] = {"triggers": ["["], "separator": "", "at_least_one": True}
    assert Admits({"structures": [tag], **rest}).which(['[a]{"a": [1]}!', "[a]2!", "[a]!"]) == [
        '[a]{"a": [1]}!',
        "[a]2!",
    ]
    with pytest.raises(InvalidRequestError, match="structural_tag"):
        Admits({"structures": [tag | {"schema": False}], **rest})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"at_least_one": True}, "at_least_one needs a separator"),
        ({"otherwise": OTHERWISE}, "otherwise needs a separator"),
        ({"otherwise": OTHERWISE, "separator": "", "at_least_one": True}, "must not be used with at_least_one"),
        ({"triggers": ["", "[g="]}, "has an empty string"),
        ({"triggers": ["[f=", "[f=d", "[g="]}, r"structures\[0\].* exactly one trigger, but starts with '\[f=' and '\[f=d'"),
        ({"triggers": ["[f="]}, r"structures\[1\].*none of them"),
        ({"triggers": ["[f=", "[g=", "[h="]}, r"no structure begins with the trigger '\[h='"),
        ({"other": 1}, "unknown field"),
        ({"structures": []}, "length >= 1"),
    ],
)  # fmt: skip
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Admits({"structures": STRUCTURES, "triggers": ["[f=", "[g="], **keys})


# -- objects whose properties stand between tags -------------------------------------------------------------------------

TAGS = {"before_key": "<p=", "after_key": ">", "after_value": "</p>", "not_in_value": ["<p=", "</p>", "</c>"]}


def calls(schema: dict[str, Any], tags: dict[str, Any] | None = None, *, is_strict: bool = True) -> dict[str, Any]:
    parts = [["#", "tools[0]", is_strict, "f"]]
    structure = {"begin": "<c>", "schema": schema, "end": "</c>", "arguments": tags or TAGS, "parts": parts}
    return {"structures": [structure], "triggers": ["<c>"], "separator": "", "at_least_one": True}


def values(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


SMALL = {"$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 3}}}
B_AND_A = {"properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
OBJECTS: list[tuple[dict[str, Any], list[str], list[str]]] = [  # schema, what it admits, what it does not
    (
        B_AND_A,
        ["<p=b>1</p><p=a>x y\n{1}</p>", "<p=b>1</p>", "<p=b>-2</p><p=a></p>"],
        [
            "",
            "<p=a>x</p>",
            "<p=b>x</p>",
            "<p=a>x</p><p=b>1</p>",
            "<p=b>1</p><p=b>1</p>",
            "<p=b>1</p><p=c>1</p>",
            "<p=b>1</p><p=a>x<p=</p>",
            "<p=b>1</p><p=a>x</c></p>",
        ],
    ),
    ({"properties": {"a": False, "b": True}}, ["", "<p=b>x</p>"], ["<p=a>x</p>", "<p=a>1</p>"]),
    ({"required": ["z"]}, ["<p=z>any text</p>"], ["", "<p=y>1</p>"]),
    ({"allOf": [B_AND_A, {"required": ["a"]}, True]}, ["<p=b>1</p><p=a>x</p>"], ["<p=b>1</p>", "<p=b>x</p><p=a>x</p>"]),
    ({"$ref": "#/$defs/o", "$defs": {"o": B_AND_A}}, ["<p=b>1</p>"], ["", "<p=b>x</p>"]),
    (values({"type": "integer"}, allOf=[{"properties": {"a": {"type": "null"}}}]), ["<p=a>1</p>"], ["<p=a>null</p>"]),
]
VALUES: list[tuple[dict[str, Any], list[str], list[str]]] = [  # the same of the value of one property
    (values({}), ["1", "null", '{"b": [1, 2]}'], ["x", ""]),
    (values({"const": "x y"}), ["x y"], ['"x y"', "x"]),
    (values({"enum": ["x", 1, None, True]}), ["x", "1", "null", "true"], ["2", '"x"', "None", ""]),
    (values({"const": [1]}), ["[1]"], ["1", "[2]"]),
    (values({"type": "string", "minLength": 2, "maxLength": 3}), ["ab", "äöü"], ["a", "abcd"]),
    (values({"type": "string", "minLength": 2}), ["ab", "abcdefgh"], ["a", ""]),
    (values({"type": "string", "maxLength": 2}), ["", "ab"], ["abc"]),
    (values({"type": "string", "minLength": 0}), ["", "abc"], ["a<p="]),
    (values({"type": "string", "maxLength": 4}), ["a"], ["<p="]),
    (values({"type": ["null", "string"]}), ["null", "x", "1 2"], ["</c>"]),
    (values({"type": ["null", "integer"]}), ["null", "1"], ["x"]),
    (values({"anyOf": [{"type": "integer"}, {"type": "null"}]}), ["1", "null"], ["x", "true"]),
    (values({"oneOf": [{"type": "integer"}, {"type": "null"}]}), ["1", "null"], ["x", "true"]),
    (values({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}), ["1", "x"], ["12"]),
    (values({"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 9}]}), ["2", "11"], ["5", '"x"']),
    (values({"anyOf": [{"type": "integer"}, True]}), ["1", '"x"'], ["x"]),
    (values({"$ref": "#/$defs/small"}, **SMALL), ["2"], ["4", "x"]),
    (values({"$ref": "#/$defs/small", "maximum": 1}, **SMALL), ["1"], ["2", "4", "-1"]),
    (values({"allOf": [{"$ref": "#/$defs/small"}, {"minimum": 2}, True]}, **SMALL), ["2"], ["4", "x"]),
    (values({"allOf": [{"type": "string"}, {"maxLength": 2}]}), ["ab"], ["abc"]),
    (
        values({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "string"}}}),
        ["x", "1"],
        ["</p>"],
    ),
    (values({"type": "array", "items": {"$ref": "#/$defs/small"}}, **SMALL), ["[0, 3]", "[]"], ["[4]", "1"]),
    (values({"type": "array", "items": {"$ref": "#"}}), ['[{"a": [{"a": []}]}]'], ["[1]", '[{"a": [1]}]', "[{}]"]),
    (values(True), ["x", "1"], ["</p>"]),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [*OBJECTS, *((schema, *([f"<p=a>{text}</p>" for text in texts] for texts in both)) for schema, *both in VALUES)],
)
def test_objects_between_tags(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    admits = Admits(calls(schema))
    assert admits.which([f"<c>{text}</c>" for text in (*good, *bad)]) == [f"<c>{text}</c>" for text in good]


def test_properties_come_in_the_order_of_the_schema() -> None:
    """Also those that may be missing. What is required and has no schema comes last."""
    text = {"type": "string"}
    admits = Admits(calls({"properties": {"a": text, "b": text, "c": text}, "required": ["d", "b"]}))
    values = {name: f"<p={name}>x</p>" for name in "abcd"}
    orders = ["abcd", "bd", "abd", "bcd", "bacd", "dabc", "bdac", "ab", "acd"]
    assert [order for order in orders if admits(f"<c>{''.join(values[name] for name in order)}</c>")] == orders[:4]


def test_white_space_in_values_that_are_json() -> None:
    schema = values({"type": "array"})
    both = ["<c><p=a>[1, 2]</p></c>", "<c><p=a>[1,2]</p></c>"]
    assert Admits(calls(schema)).which(both) == both
    assert Admits(calls(schema), disable_any_whitespace=True).which(both) == both[1:]
    assert Admits(calls(schema), separators=(", ", ": ")).which(both) == both[:1]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (values({"type": "string", "pattern": "x"}), "#/properties/a/pattern"),
        (values({"type": "string", "format": "date"}), "#/properties/a/format"),
        (values({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "x"}]}), "#/properties/a/pattern"),
        (values({"type": "integer"}, minProperties=1), "#/minProperties"),
        (values({"type": "integer"}, patternProperties={"x": {}}), "#/patternProperties"),
        ({"allOf": [{"anyOf": [B_AND_A]}]}, "#/anyOf"),
    ],
)
def test_what_a_strict_object_between_tags_cannot_have(schema: dict[str, Any], place: str) -> None:
    with refused("tools[0]", place):
        Admits(calls(schema))
    Admits(calls(schema, is_strict=False))  # it is not refused


# -- tokens of markup ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("", ""), ("\n", ""), ("", "\n"), ("x", "y<tool_call>z")])
def test_a_value_that_a_token_of_markup_closes(before: str, after: str) -> None:
    """</tool_call> is a token of the vocabulary, but may also come as letters."""
    close = f"{before}</tool_call>{after}"
    tags = {"before_key": "<p=", "after_key": ">", "after_value": close, "not_in_value": ["</tool_call>"]}
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
    admits = Admits(calls(schema, tags))
    good = f"<c><p=a>v w{close}<p=b>1{close}</c>"
    bad = [
        f"<c><p=a>v{close[:-1]}<p=b>1{close}</c>",
        f"<c><p=a>v</tool_call>{close}<p=b>1{close}</c>",
        f"<c><p=a>v{close}<p=b>v{close}</c>",
    ]
    for letters in (False, True):
        assert admits(good, letters=letters)
        assert not any(admits(text, letters=letters) for text in bad)


def test_a_value_that_a_special_token_closes() -> None:
    """The text <|im_start|> can only be the token; its letters are other text."""
    close = "\n<|im_start|>!"
    tags = {"before_key": "<p=", "after_key": ">", "after_value": close, "not_in_value": ["</p>"]}
    admits = Admits(calls({"properties": {"a": {"type": "string"}}}, tags))
    assert admits(f"<c><p=a>v{close}</c>")
    assert not admits(f"<c><p=a>v{close}</c>", letters=True)
    assert not admits("<c><p=a>v<|im_start|>!</c>")


def test_the_letters_of_a_special_token_are_no_trigger() -> None:
    structure = {"begin": "<|im_start|>", "schema": POINT, "end": "."}
    admits = Admits({"structures": [structure], "triggers": ["<|im_start|>"]})
    text = json.dumps({"x": 1})
    assert admits(f"a<|im_start|>{text}. b")
    assert not admits("a<|im_start|>b")
    assert admits("a<|im_start|>b", letters=True)
