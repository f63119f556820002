"""Strict tools: the tag made of them, on both backends, and what is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams, StructuredOutputsParams
from inflight.structured_output.spec import GrammarSpec, parse_structural_tag
from inflight.structured_output.tool_calls import strict_tool_calls, with_strict_tools
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.structured_output.grammar_case import BACKENDS, MODEL, POINT, backend, text_of, tokenizer, walk

TEMPLATE = ChatTemplate.from_folder(MODEL)
NOTE = {"type": "object", "properties": {"text": {"enum": ["a", "b"]}}, "required": ["text"]}


def tool(name: object = "plot", parameters: object = POINT, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool(strict=True), tool("note", NOTE)]


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def structures(*tools: dict[str, Any]) -> list[tuple[str, object]]:
    constraint = strict_tool_calls(tools)
    assert constraint is not None
    return [(tag.begin, tag.schema) for tag in parse_structural_tag(str(constraint.structural_tag))]


def test_one_tag_a_tool_and_none_without_a_strict_one() -> None:
    plot, note = '<tool_call>\n{"name": "plot", "arguments": ', '<tool_call>\n{"name": "note", "arguments": '
    assert structures(*TOOLS) == [(plot, POINT), (note, {"type": "object"})]
    assert structures({**tool(), "strict": True}) == [(plot, POINT)]
    assert structures({"name": "plot", "parameters": POINT, "strict": True}) == [(plot, POINT)]
    assert structures(tool(parameters=None, strict=True))[0][1] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    for tools in (None, [], [tool()], [tool(strict=False)], [tool(strict=None)], [tool(name=3)], [tool(), tool()]):
        assert strict_tool_calls(tools) is None


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (tool(""), r"tools\[1\] has the name ''"),
        (tool(None), r"tools\[1\] has the name None"),
        (tool('a"b'), r"without quotes, backslashes and control characters"),
        (tool("a\nb"), r"tools\[1\] has the name"),
        (tool("a\\b"), r"tools\[1\] has the name"),
        (tool("plot"), r"tools\[1\] has the name 'plot' of an earlier tool"),
        (tool("b", [], strict=True), r"tools\[1\] \('b'\) is strict: its parameters must be a JSON schema"),
        (tool("b", {}, strict=True), r"tools\[1\] \('b'\) is strict: .* with \"type\": \"object\""),
        (tool("b", {"type": "array"}, strict=True), r"tools\[1\] \('b'\) is strict"),
        (tool("b", strict="yes"), r"tools\[1\]: strict is neither true nor false"),
        ({**tool("b"), "strict": 1}, r"tools\[1\]: strict is neither true nor false"),
        ({"function": "b"}, r"tools\[1\]: function is a str"),
        ("b", r"tools\[1\] is a str"),
    ],
)
def test_malformed_tools_are_refused_by_their_index(second: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        strict_tool_calls([tool(strict=True), second])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_keyword_that_is_not_supported_is_named_with_its_tool(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    params = strict_tool_calls([*TOOLS, tool("bad", schema, strict=True)])
    assert params is not None
    with pytest.raises(InvalidRequestError, match=r'structures\[2\].*"bad".*: #/properties/a/not is not supported'):
        backend(name, "embedded").check(GrammarSpec.from_params(params))


def test_a_one_of_that_may_overlap_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    params = strict_tool_calls([tool(parameters=schema, strict=True)])
    assert params is not None
    with pytest.raises(InvalidRequestError, match=r"oneOf \(#/structures/0/schema/properties/a/oneOf\)"):
        backend("llguidance", "embedded").compile(GrammarSpec.from_params(params))


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


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["embedded", "byte_level"])
def test_only_whole_calls_of_the_tools_are_admitted(name: str, kind: str) -> None:
    params = strict_tool_calls(TOOLS)
    assert params is not None
    compiled = backend(name, kind).compile(GrammarSpec.from_params(params))
    for texts, expected in ((GOOD, True), (BAD, False)):
        for text in texts:
            token_ids = tokenizer(kind).encode(text, add_special_tokens=False)
            matcher = compiled.matcher()
            assert (matcher.accept_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is expected, text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["embedded", "byte_level"])
def test_what_the_masks_allow_behind_a_trigger_is_a_call(name: str, kind: str) -> None:
    grammar = backend(name, kind)
    schemas = {"plot": POINT, "note": NOTE | {"additionalProperties": False}}
    params = strict_tool_calls([tool(each, schema, strict=True) for each, schema in schemas.items()])
    assert params is not None
    compiled = grammar.compile(GrammarSpec.from_params(params))
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


def test_parameters_are_constrained_once_and_only_by_a_strict_tool() -> None:
    params = SamplingParams(temperature=0.5)
    assert with_strict_tools(params, [tool()], TEMPLATE) is params
    constrained = with_strict_tools(params, TOOLS, TEMPLATE)
    assert constrained == SamplingParams(temperature=0.5, structured_outputs=strict_tool_calls(TOOLS))
    own = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert with_strict_tools(own, [tool()], TEMPLATE) is own
    with pytest.raises(InvalidRequestError, match="structured_outputs and a strict tool both constrain the text"):
        with_strict_tools(own, TOOLS, TEMPLATE)


LOOP = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        LOOP + "<tool_call>{{ call.function.name }}<arg_key>a</arg_key></tool_call>" + END,
        LOOP + '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>' + END,
        "{{ raise_exception('no tools') }}",
    ],
)
def test_a_model_that_writes_calls_in_another_way_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="needs a model whose chat template writes calls as <tool_call>"):
        with_strict_tools(SamplingParams(), TOOLS, ChatTemplate({"default": template}))


def test_a_template_like_qwens_is_served() -> None:
    head = """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    body = "{{ call.function.arguments | tojson }}"
    template = ChatTemplate({"default": LOOP + head + body + "{{ '}\\n</tool_call>' }}" + END})
    assert with_strict_tools(SamplingParams(), TOOLS, template).structured_outputs == strict_tool_calls(TOOLS)
