"""Tool choice and strict tools: the tag made of them, on both backends, in every markup, and what is refused."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from inflight.errors import InvalidRequestError
from inflight.interface.events import ContentDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.markup import MARKUPS, ToolMarkup
from inflight.parsers.selector import create_output_parser
from inflight.parsers.tool_choice import ToolChoice, constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.structural_tag import StructuralTag, parse_structural_tag
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.refusals import refused
from tests.support.schema_generator import texts
from tests.unit.parsers.parser_cases import parse
from tests.unit.structured_output.grammar_case import POINT, backend, text_of, tokenizer, walk

HERMES = MARKUPS[0]
NOTE = {"type": "object", "properties": {"text": {"enum": ["a", "b"]}}, "required": ["text"]}


def tool(name: object = "plot", parameters: object = POINT, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool(strict=True), tool("note", NOTE)]


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def constraint(
    tools: list[dict[str, Any]],
    choice: ToolChoice = "auto",
    *,
    markup: ToolMarkup | None = HERMES,
    parallel: bool = True,
) -> StructuredOutputsParams | None:
    params = SamplingParams()
    return constrain_tools(params, tools, choice, parallel_tool_calls=parallel, markup=markup).structured_outputs


def spec_of(*args: Any, **kwargs: Any) -> GrammarSpec:
    params = constraint(*args, **kwargs)
    assert params is not None
    return GrammarSpec.from_params(params)


def tag_of(*args: Any, **kwargs: Any) -> StructuralTag:
    return parse_structural_tag(spec_of(*args, **kwargs).text)


def structures(*tools: dict[str, Any]) -> list[tuple[str, object]]:
    return [(tag.begin, tag.schema) for tag in tag_of(list(tools)).tags]


def test_one_tag_a_tool_and_none_without_a_strict_one() -> None:
    plot, note = '<tool_call>\n{"name": "plot", "arguments": ', '<tool_call>\n{"name": "note", "arguments": '
    assert structures(*TOOLS) == [(plot, POINT), (note, {"type": "object"})]
    assert structures({**tool(), "strict": True}) == [(plot, POINT)]
    assert structures({"name": "plot", "parameters": POINT, "strict": True}) == [(plot, POINT)]
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    assert structures(tool(parameters=None, strict=True))[0][1] == no_arguments
    params = SamplingParams()
    for tools in (None, [], [tool()], [tool(strict=False)], [tool(strict=None)], [tool(name=3)], [tool(), tool()]):
        assert constrain_tools(params, tools, markup=HERMES) is params
        assert constrain_tools(params, tools, "none", markup=None) is params
        assert constrain_tools(params, tools, parallel_tool_calls=False, markup=None) is params
    assert constrain_tools(params, TOOLS, "none", markup=HERMES) is params


def test_a_choice_leaves_the_tags_it_admits() -> None:
    required = tag_of(TOOLS, "required")
    assert [tag.schema for tag in required.tags] == [POINT, NOTE]  # strict or not
    assert (required.separator, required.at_least_one, required.stop_after_first) == ("\n", True, False)
    assert tag_of(TOOLS, "required", parallel=False).stop_after_first
    named = tag_of(TOOLS, {"name": "note"})
    assert [tag.schema for tag in named.tags] == [NOTE]
    assert (named.at_least_one, named.stop_after_first) == (True, True)
    auto = tag_of(TOOLS, parallel=False)
    assert (auto.separator, auto.at_least_one, auto.stop_after_first) == (None, False, True)
    assert tag_of([tool(parameters={"properties": {}})], "required").tags[0].schema == {
        "type": "object",
        "properties": {},
    }


def test_a_list_of_calls_is_the_whole_text_and_keeps_the_data_of_schemas() -> None:
    """References are moved with their schema; what only looks like one, in an enumeration, is data."""
    data = {"$ref": "#/a"}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/p"}, "y": {"enum": [data]}, "z": {"const": data}}}
    tools = [tool(strict=True, parameters={**schema, "$defs": {"p": {"type": "integer"}}})]
    for parallel in (True, False):
        tag = tag_of(tools, "required", markup=MARKUPS[2], parallel=parallel)
        assert tag.stop_after_first
        (calls,) = tag.tags
        assert calls.schema.get("maxItems") == (None if parallel else 1)
        properties = calls.schema["items"]["anyOf"][0]["properties"]["arguments"]["properties"]
        assert properties["x"] == {"$ref": "#/items/anyOf/0/properties/arguments/$defs/p"}
        assert (properties["y"], properties["z"]) == ({"enum": [data]}, {"const": data})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (tool(""), r"tools\[1\] has the name ''"),
        (tool(None), r"tools\[1\] has the name None"),
        (tool('a"b'), r"without white space, quotes"),
        (tool("a\nb"), r"tools\[1\] has the name"),
        (tool("a\\b"), r"tools\[1\] has the name"),
        (tool("a b"), r"tools\[1\] has the name 'a b'; a name is a string without white space, quotes"),
        (tool("plot"), r"tools\[1\] has the name 'plot' of an earlier tool"),
        (tool("b", [], strict=True), r"tools\[1\] \('b'\) is strict: its parameters must be a JSON schema"),
        (tool("b", {}, strict=True), r"tools\[1\] \('b'\) is strict: .* with \"type\": \"object\""),
        (tool("b", {"type": "array"}, strict=True), r"tools\[1\] \('b'\) is strict"),
        (tool("b", strict="yes"), r"tools\[1\]: strict must be true or false"),
        ({**tool("b"), "strict": 1}, r"tools\[1\]: strict must be true or false"),
        ({"function": "b"}, r"tools\[1\]: function is a str"),
        ("b", r"tools\[1\] is a str"),
    ],
)
def test_malformed_tools_are_refused_by_their_index(second: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        constraint([tool(strict=True), second])


def test_a_keyword_that_is_not_supported_is_named_with_its_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    for markup in (HERMES, MARKUPS[2]):  # a tag for each tool, and one list for all
        for choice in ("auto", "required"):
            spec = spec_of([tool(), tool("bad", schema, strict=True)], choice, markup=markup)
            message = (
                r"^tools\[1\] \('bad'\): #/properties/a/not is not supported; leave it out, or set strict to false"
            )
            with pytest.raises(InvalidRequestError, match=message):
                backend("embedded").relax(spec)


def test_of_a_tool_that_is_not_strict_it_is_left_out_and_told() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}, "type": "integer"}, "b": {"$ref": "#/properties/a"}}}
    for markup in (HERMES, MARKUPS[2]):
        relaxed, told = backend("embedded").relax(spec_of([tool(), tool("odd", schema)], "required", markup=markup))
        assert texts(told) == ["tools[1] ('odd'): #/properties/a/not"]
        if markup is HERMES:
            backend("embedded").compile(relaxed)


@pytest.mark.parametrize("strict", [False, True])
def test_what_zod_and_pydantic_write_is_taken(strict: bool) -> None:
    properties = {
        "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        "set": {"type": "array", "items": {"type": "integer", "format": "int32"}, "uniqueItems": True},
        "file": {"type": "string", "format": "binary"},
    }
    schema = {"type": "object", "properties": properties, "required": ["file"], "additionalProperties": False}
    for choice in ("auto", "required") if strict else ("required",):
        spec = spec_of([tool("f", schema, strict=strict)], choice)
        told = texts(backend("embedded").relax(spec)[1])
        assert sorted(told) == [
            "tools[0] ('f'): #/properties/file/format",
            "tools[0] ('f'): #/properties/set/items/format",
            "tools[0] ('f'): #/properties/set/uniqueItems",
        ]
        assert admits("embedded", spec, call("f", {"file": "a"}))
        assert not admits("embedded", spec, call("f", {"file": 1}))


def test_a_one_of_that_may_overlap_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    with refused("tools", "tools[0] ('plot'): #/properties/a/oneOf"):
        backend("embedded").compile(spec_of([tool(parameters=schema, strict=True)]))


GOOD = [
    "no call",
    "<tool_cal",
    call("plot", {"x": 1}),
    f"first {call('plot', {'x': 1})}\n{call('note', {'any': [1, 'b']})} then text",
    call("note", {}),
]
BAD = [
    "<tool_call>",
    "<tool_call> text",
    call("plot", {"x": 10}),
    call("plot", {"y": 1}),
    call("plot", {}),
    call("note", [1]),
    call("other", {}),
    call("plot", {"x": 1}).replace("}\n", ', "more": 1}\n'),
    call("plot", {"x": 1}).removesuffix("</tool_call>"),
]


PLOT, NOTED = call("plot", {"x": 1}), call("note", {"text": "a"})
FORCED_BAD = [
    "",
    "text",
    f" {PLOT}",
    f"{PLOT} text",
    PLOT + NOTED,
    f"{PLOT}\n",
    PLOT[:-1],
    call("note", {"text": "c"}),
    call("other", {}),
]
# choice, whether calls may be parallel, texts that are admitted, texts that are not
CHOICES: list[tuple[ToolChoice, bool, list[str], list[str]]] = [
    ("auto", True, GOOD, BAD),
    ("auto", False, ["no call", PLOT, f"first {PLOT}"], [*BAD, f"{PLOT} text", f"{PLOT}\n{NOTED}"]),
    ("required", True, [PLOT, NOTED, f"{PLOT}\n{NOTED}\n{PLOT}"], [*BAD, *FORCED_BAD]),
    ("required", False, [PLOT, NOTED], [*BAD, *FORCED_BAD, f"{PLOT}\n{NOTED}"]),
    ({"name": "note"}, True, [NOTED], [*BAD, *FORCED_BAD, PLOT, f"{NOTED}\n{NOTED}"]),
]


def admits(kind: str, spec: GrammarSpec, text: str) -> bool:
    token_ids = tokenizer(kind).encode(text, add_special_tokens=False)
    matcher = backend(kind).compile(spec).matcher()
    return matcher.accept_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["embedded", "byte_level"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice[0]}-{choice[1]}")
def test_only_whole_calls_of_the_tools_are_admitted(
    kind: str, choice: tuple[ToolChoice, bool, list[str], list[str]]
) -> None:
    wanted, parallel, good, bad = choice
    spec = spec_of(TOOLS, wanted, parallel=parallel)
    assert [text for text in good if not admits(kind, spec, text)] == []
    assert [text for text in bad if admits(kind, spec, text)] == []


def test_a_message_of_llamas_is_calls_or_does_not_begin_like_one() -> None:
    spec = spec_of(TOOLS, markup=MARKUPS[1])
    good = ["", "  a {b} c", "[1]", '{"name": "plot", "parameters": {"x": 1}}']
    good.append(f'{good[-1]}; {{"name": "note", "parameters": {{"any": 1}}}}')
    bad = [
        "{",
        " {}",
        '{"name": "plot", "parameters": {"x": 10}}',
        '{ "name": "plot", "parameters": {"x": 1}}',
        f"{good[-1]} text",
    ]
    assert [text for text in good if not admits("embedded", spec, text)] == []
    assert [text for text in bad if admits("embedded", spec, text)] == []
    required = spec_of(TOOLS, "required", markup=MARKUPS[1])
    assert not any(admits("embedded", required, text) for text in good[:3])


TREE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/end"}},
    "required": ["x", "next"],
    "additionalProperties": False,
    "$defs": {
        "end": {
            "anyOf": [{"const": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#/properties/x"}, "maxItems": 1}]
        }
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {"plot": POINT, "note": {**NOTE, "additionalProperties": False}, "tree": TREE}


@pytest.mark.parametrize("kind", ["embedded", "byte_level"])
@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.begin("f"))
def test_what_the_masks_allow_is_what_the_parser_reads(kind: str, markup: ToolMarkup) -> None:
    """The model is a die here: the constraint alone makes the calls."""
    grammar = backend(kind)
    tools = [tool(name, schema) for name, schema in SCHEMAS.items()]
    called: set[str] = set()
    num_calls = []
    for choice, parallel, seeds in (("required", True, 8), ("required", False, 4), ({"name": "tree"}, True, 3)):
        compiled = grammar.compile(spec_of(tools, choice, parallel=parallel, markup=markup))
        for seed in range(seeds):
            token_ids = walk(compiled.matcher(), grammar, random.Random(seed), max_tokens=900)
            if token_ids[-1] not in grammar.eos_token_ids:  # white space, or one call after another
                continue
            text = text_of(kind, token_ids, grammar)
            events = parse(create_output_parser(markup.parser, None, tools=tools), list(text))
            assert not any(isinstance(event, ContentDelta) for event in events), text
            starts = [event for event in events if isinstance(event, ToolCallStart)]
            deltas = [event for event in events if isinstance(event, ToolArgumentsDelta)]
            for start, arguments in zip(starts, deltas, strict=True):
                jsonschema.validate(json.loads(arguments.text), SCHEMAS[start.name])
                called.add(start.name)
                assert choice == "required" or start.name == "tree"
            num_calls.append(len(starts))
            assert len(starts) == 1 or (choice == "required" and parallel and starts)
    assert called == set(SCHEMAS)
    assert len(num_calls) > 8
    assert max(num_calls) > 1


@pytest.mark.parametrize("kind", ["embedded", "byte_level"])
def test_what_the_masks_allow_behind_a_trigger_is_a_call(kind: str) -> None:
    grammar = backend(kind)
    schemas = {"plot": POINT, "note": NOTE | {"additionalProperties": False}}
    compiled = grammar.compile(spec_of([tool(each, schema, strict=True) for each, schema in schemas.items()]))
    start = tokenizer(kind).encode("<tool_call>", add_special_tokens=False)
    called = set()
    for seed in range(6):
        matcher = compiled.matcher()
        assert matcher.accept_tokens(start) == len(start)
        text = text_of(kind, start + walk(matcher, grammar, random.Random(seed), max_tokens=300), grammar)
        found = re.match(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        assert found, text
        body = json.loads(found[1])
        jsonschema.validate(body["arguments"], schemas[body["name"]])
        called.add(body["name"])
    assert called == set(schemas)


def test_parameters_are_constrained_once_and_only_where_they_must_be() -> None:
    params = SamplingParams(temperature=0.5)
    assert constrain_tools(params, [tool()], markup=HERMES) is params
    constrained = constrain_tools(params, TOOLS, markup=HERMES)
    assert constrained == SamplingParams(temperature=0.5, structured_outputs=constraint(TOOLS))
    own = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert constrain_tools(own, [tool()], parallel_tool_calls=False, markup=HERMES) is own
    with refused("regex"):
        constrain_tools(own, TOOLS, markup=HERMES)
    with refused("regex"):
        constrain_tools(own, [tool()], "required", markup=HERMES)


ANSWER = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
ANY_ANSWER = StructuredOutputsParams(json_object=True)


def with_answer(answer: StructuredOutputsParams, tools: Any, choice: ToolChoice = "auto", **more: Any) -> GrammarSpec:
    params = SamplingParams(structured_outputs=answer)
    constrained = constrain_tools(params, tools, choice, **{"markup": HERMES, **more}).structured_outputs
    assert constrained is not None
    return GrammarSpec.from_params(constrained)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("answer", [ANSWER, ANY_ANSWER])
def test_a_call_or_the_json_may_come(strict: bool, answer: StructuredOutputsParams) -> None:
    tools = [tool(strict=strict), tool("note", NOTE)]
    spec = with_answer(answer, tools)
    plot, note = call("plot", {"x": 1}), call("note", {"any": "b"})
    for text in ('{"a": 12}', '{"a":  12}', plot, note, f"{plot}\n{note}"):
        assert admits("embedded", spec, text), text
    for text in (
        "",
        "text",
        '{"a": 1}{"a": 1}',
        f'{{"a": 1}}\n{plot}',
        f'{plot}\n{{"a": 1}}',
        call("other", {}),
        "<tool_call>",
    ):
        assert not admits("embedded", spec, text), text
    assert admits("embedded", spec, '{"b": 1}') == (answer is ANY_ANSWER)
    assert admits("embedded", spec, call("plot", {"x": 10})) == (not strict)
    assert not admits("embedded", with_answer(answer, tools, parallel_tool_calls=False), f"{plot}\n{note}")


def test_a_call_that_must_come_comes_whatever_else_is_wanted() -> None:
    for choice in ("required", {"name": "plot"}):
        assert with_answer(ANSWER, TOOLS, choice) == spec_of(TOOLS, choice)
        assert with_answer(ANY_ANSWER, TOOLS, choice) == spec_of(TOOLS, choice)


def test_json_stands_alone_where_no_grammar_describes_calls() -> None:
    params = SamplingParams(structured_outputs=ANSWER)
    assert constrain_tools(params, [tool()], markup=None) is params
    assert constrain_tools(params, TOOLS, "none", markup=HERMES) is params
    assert constrain_tools(params, [], markup=HERMES) is params


MIXED = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "either": {"oneOf": [{"enum": ["a", "null", None]}, {"type": "integer", "maximum": 9, "minimum": 0}]},
        "named": {"$ref": "#/$defs/name"},
        "merged": {"allOf": [{"$ref": "#/$defs/name"}, {"description": "d"}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2},
        "flag": {"type": ["boolean", "null"]},
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
        "never": False,
    },
    "required": ["short", "either", "merged", "named", "flag"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["</b>", "3", "x y"]}},
}
TAGGED_MARKUPS = [markup for markup in MARKUPS if markup.arguments is not None]


@pytest.mark.parametrize("markup", TAGGED_MARKUPS, ids=[each.parser for each in TAGGED_MARKUPS])
def test_values_between_tags_are_what_the_parser_reads(markup: ToolMarkup) -> None:
    grammar = backend("byte_level")
    tools = [tool("f", MIXED, strict=True)]
    compiled = grammar.compile(spec_of(tools, {"name": "f"}, markup=markup))
    num_whole = 0
    for seed in range(16):
        token_ids = walk(compiled.matcher(), grammar, random.Random(seed), max_tokens=900)
        if token_ids[-1] not in grammar.eos_token_ids:
            continue
        text = text_of("byte_level", token_ids, grammar)
        events = parse(create_output_parser(markup.parser, None, tools=tools), [text])
        (arguments,) = [event for event in events if isinstance(event, ToolArgumentsDelta)]
        jsonschema.validate(json.loads(arguments.text), MIXED)
        num_whole += 1
    assert num_whole > 3


def test_values_between_tags_of_a_strict_tool_are_what_its_schema_says_or_refused() -> None:
    markup = TAGGED_MARKUPS[0]
    parameters = {"type": "object", "properties": {"s": {"type": "string", "minLength": 2}, "n": {"type": "integer"}}}
    spec = spec_of([tool("f", parameters, strict=True)], "required", markup=markup)
    good = [{}, {"s": "a </b>\n c"}, {"n": 3}, {"s": "ab", "n": 3}]
    bad = [{"s": "a"}, {"n": 3, "s": "ab"}, {"n": "x"}, {"x": 1}, {"s": "a</parameter>b"}]
    assert [each for each in good if not admits("embedded", spec, markup.call("f", each))] == []
    assert [each for each in bad if admits("embedded", spec, markup.call("f", each))] == []
    for schema in ({"type": "string", "pattern": "a"}, {"type": "string", "format": "date"}):
        for strict in (True, False):
            tools = [tool("f", {"type": "object", "properties": {"s": schema}}, strict=strict)]
            spec = spec_of(tools, "required", markup=markup)
            if strict:
                with refused("tools[0]", "#/properties/s/"):
                    backend("embedded").compile(spec)
            else:
                assert admits("embedded", spec, markup.call("f", {"s": "text"}))


FREE_MARKUPS = [markup for markup in MARKUPS if not markup.only_forced]


@pytest.mark.parametrize("markup", FREE_MARKUPS, ids=[f"{each.parser}-{i}" for i, each in enumerate(FREE_MARKUPS)])
def test_a_call_or_the_json_in_every_markup(markup: ToolMarkup) -> None:
    spec = with_answer(ANSWER, TOOLS, markup=markup)
    assert admits("embedded", spec, '{"a": 12}')
    assert not admits("embedded", spec, "text")
    end = "}]" if markup.is_list else ""
    one = markup.call("plot", {"x": 1}) + end
    assert admits("embedded", spec, one), one
    assert not admits("embedded", spec, markup.call("plot", {"x": 10}) + end)
    if not markup.is_list:
        assert admits("embedded", spec, one + markup.separator + one)
    single = with_answer(ANSWER, TOOLS, markup=markup, parallel_tool_calls=False)
    assert admits("embedded", single, one)
    assert not admits("embedded", single, one + markup.separator + one)


def test_white_space_and_leniency_of_the_json_are_kept() -> None:
    answer = StructuredOutputsParams(json={"type": "object", "not": {}}, separators=(", ", ": "), lenient=True)
    spec = with_answer(answer, TOOLS)
    assert spec.separators == (", ", ": ")
    assert texts(backend("embedded").relax(spec)[1]) == ["response_format: #/not"]
    with pytest.raises(InvalidRequestError, match=r"^response_format: #/not is not supported"):
        backend("embedded").relax(with_answer(replace(answer, lenient=False), TOOLS))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([tool()], "always", "tool_choice='always' is not allowed: give"),
        ([tool()], {"function": "plot"}, "object that names a function"),
        ([], "required", "tool_choice='required' needs tools, and the request has none"),
        (None, {"name": "plot"}, "tool_choice='plot' needs tools"),
        ([tool()], {"name": "plod"}, "tool_choice names 'plod', which is none of the tools: plot"),
        (
            [tool(parameters={"type": "object", "title": "x" * 2**20})],
            "required",
            "the schemas of the tools .* can be enforced",
        ),
        ([tool(parameters={"type": "array"})], "required", r"tools\[0\] \('plot'\) is a tool that must be called"),
    ],
)
def test_choices_that_cannot_be(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        constraint(tools, choice)


@pytest.mark.parametrize("choice", ["auto", "required", {"name": "plot"}])
def test_a_model_that_writes_calls_in_no_known_way_is_refused(choice: ToolChoice) -> None:
    with pytest.raises(InvalidRequestError, match="needs a model whose calls a grammar can describe"):
        constraint(TOOLS, choice, markup=None)
