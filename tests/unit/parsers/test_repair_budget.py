"""All repairs in one answer have one bound."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from inflight.parsers import selector, tool_parser
from inflight.parsers.argument_schema import ArgumentSchema
from inflight.parsers.json_dialect import DialectReader
from inflight.parsers.repair_budget import RepairBudget, TooMuchWorkError
from inflight.parsers.tool_parser import ToolParser
from tests.unit.parsers.damage import parse_object
from tests.unit.parsers.parser_cases import Case, parse
from tests.unit.parsers.test_repair import NAME, TOOL, found_calls

NUM_CHARS = 2_000
NUM_STEPS = 500
BODIES = (
    '{"name": "',
    f'{{"name": "{NAME}" "arguments": {{"x": [1,',
    f'{{"name": "{NAME}", "arguments": {{"x": "a" 1}}}}',
    f'{NAME}{{"x": "a',
    f'[{NAME}(x={{"a":',
    f"function={NAME}><parameter=x>[1 2, 3 4</parameter>",
    '<arg_key>x</arg_key><arg_value>{"a" "b": 1',
    "call:" + NAME + '{x:{a b, c:<|"|>d<|"|> e:1}}',
)
PARSERS = {cls: name for name, cls in selector.TOOL_PARSERS.items()}


@pytest.fixture
def count_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Gives every answer `NUM_STEPS` steps. The function returns how many steps readers of JSON have made."""
    steps = [0]
    step = DialectReader.step

    def counted(reader: DialectReader) -> bool:
        steps[0] += 1
        return step(reader)

    monkeypatch.setattr(DialectReader, "step", counted)
    monkeypatch.setattr(tool_parser, "RepairBudget", lambda: RepairBudget(NUM_STEPS))
    return lambda: steps[0]


@pytest.mark.parametrize("parser", PARSERS, ids=PARSERS.values())
def test_a_text_that_looks_damaged_in_many_places_is_read_in_linear_time(
    parser: type[ToolParser], count_steps: Callable[[], int]
) -> None:
    for begin in {parser.marker, parser.second_marker, *parser.beginnings()}:
        for body in BODIES:
            for end in ("", *parser.ends[:1]):
                unit = begin + body + end
                text = (unit * (NUM_CHARS // len(unit) + 1))[:NUM_CHARS]
                before = count_steps()
                parse(Case(PARSERS[parser], text, [], options={"tools": [TOOL]}).parser(), [text], is_cut=False)
                assert count_steps() - before <= NUM_STEPS + 2 * NUM_CHARS, unit


@pytest.mark.parametrize(
    ("tool", "call"),
    [
        ("hermes", '<tool_call>{"name": "run", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]run{}"),
        ("jamba", '<tool_calls>[{"name": "run", "arguments": {}}]</tool_calls>'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>run<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
)
def test_calls_behind_the_bound_are_passed_on_as_they_were_written(
    tool: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_parser, "RepairBudget", lambda: RepairBudget(12 * NUM_STEPS))
    damaged, valid = '{"s": "a", "n" 1}', '{"s": "b", "n": 2}'
    num_damaged = 30
    text = "".join(call.replace("{}", each) for each in (*[damaged] * num_damaged, valid))
    case = Case(tool, text, [], options={"tools": [TOOL]})
    found = found_calls(parse(case.parser(), [text], is_cut=False))
    assert found_calls(parse(case.parser(), list(text), is_cut=False)) == found
    assert {name for name, _ in found} == {NAME}
    num_mended = [parse_object(arguments) for _, arguments in found].count({"s": "a", "n": 1})
    assert 0 < num_mended < num_damaged
    assert [arguments for _, arguments in found[num_mended:]] == [damaged] * (num_damaged - num_mended) + [valid]


def test_values_in_tags_share_the_bound_with_calls(count_steps: Callable[[], int]) -> None:
    damaged = '{"a": "x" "b": [1, 2}'
    values = f"<parameter=x>{damaged}</parameter>" * 40
    text = f"<tool_call><function={NAME}>{values}</function></tool_call>"
    parse(Case("qwen3_coder", text, [], options={"tools": [TOOL]}).parser(), [text], is_cut=False)
    assert count_steps() <= NUM_STEPS + 4 * len(text)


@pytest.mark.parametrize(
    ("tool", "call", "argument"),
    [
        ("qwen3_coder", "<tool_call><function=run>{}</function></tool_call>", "<parameter=x>{}</parameter>"),
        ("glm45", "<tool_call>run\n{}</tool_call>", "<arg_key>x</arg_key><arg_value>{}</arg_value>"),
    ],
)
def test_the_work_with_a_large_schema_does_not_grow_with_the_number_of_values(
    tool: str, call: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_branches, num_values = 50, 100
    work = [0]
    find_types, find_fit = ArgumentSchema._find_types, ArgumentSchema._find_fit

    def counted_types(*given: Any) -> frozenset[str]:
        work[0] += 1
        return find_types(*given)

    def counted_fit(*given: Any) -> bool:
        work[0] += 1
        return find_fit(*given)

    monkeypatch.setattr(ArgumentSchema, "_find_types", counted_types)
    monkeypatch.setattr(ArgumentSchema, "_find_fit", counted_fit)
    monkeypatch.setattr(tool_parser, "RepairBudget", lambda: RepairBudget(NUM_STEPS))
    branches = [{"type": ["integer", "string"], "const": f"v{i}"} for i in range(num_branches)]
    parameters = {"type": "object", "properties": {"x": {"anyOf": branches}}}
    asked = [{"type": "function", "function": {"name": NAME, "parameters": parameters}}]
    text = call.replace("{}", "".join(argument.replace("{}", str(i)) for i in range(num_values)))
    parse(Case(tool, text, [], options={"tools": asked}).parser(), [text], is_cut=False)
    assert num_branches < work[0] <= NUM_STEPS + 2 * num_branches + num_values


def test_more_than_there_is_cannot_be_spent() -> None:
    budget = RepairBudget(10)
    budget.spend(4)
    budget.spend(num_chars=256 * 5)
    assert budget.is_left
    budget.spend(1)
    assert not budget.is_left
    with pytest.raises(TooMuchWorkError):
        budget.spend(1)


def num_calls(parser: str, text: str, num_arguments: int) -> int:
    """How many functions are called while the text of a call of a tool with so many arguments is read."""
    properties = {f"argument_{i}": {"type": "string"} for i in range(num_arguments)}
    tool = {"type": "function", "function": {"name": NAME, "parameters": {"type": "object", "properties": properties}}}
    output_parser = Case(parser, text, [], options={"tools": [tool]}).parser()
    count = [0]

    def see(_: object, event: str, __: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        output_parser.push(text)
        output_parser.finish()
    finally:
        sys.setprofile(before)
    return count[0]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", f"<tool_call><function={NAME}><parameter=argument_1>" + "<" * 500),
        ("qwen3_coder", f"<tool_call><function={NAME}>" + "<parameter=argument_1>a\n</parameter>" * 40),
        ("glm45", f"<tool_call>{NAME}<arg_key>argument_1</arg_key><arg_value>" + "<arg" * 200),
        ("minicpm5", f'<function name="{NAME}">' + '<param name="argument_1">a</param>' * 40),
        ("gemma4", f"<|tool_call>call:{NAME}{{" + "argument_1:a word," * 100 + "}<tool_call|>"),
        ("lfm2", f"<|tool_call_start|>[{NAME}(argument_1=" + "'a' 'b' " * 100),
        ("lfm2", f"<|tool_call_start|>[{NAME}(argument_1='" + "', '" * 100),
        ("hermes", f'<tool_call>{{"name": "{NAME}", "arguments": {{"argument_1": "a" 1}}}}</tool_call>' * 40),
    ],
)
def test_a_tool_with_many_arguments_is_read_as_fast_as_one_with_few(parser: str, text: str) -> None:
    few = num_calls(parser, text, 10)
    assert num_calls(parser, text, 1000) - few < few / 2 + 60 * 1000
