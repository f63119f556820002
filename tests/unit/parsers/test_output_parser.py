"""Parsers: what each text means, that it means the same however it is split, in linear time and bounded memory."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from inflight.errors import ConfigError
from inflight.interface.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)
from inflight.parsers import arguments_reader, buffered_value, event_writer, output_parser
from inflight.parsers.arguments_reader import LAG
from inflight.parsers.buffered_value import as_json
from inflight.parsers.reasoning import Opening
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.repair_budget import RepairBudget
from inflight.parsers.selector import TOOL_PARSERS, create_output_parser
from tests.conftest import FULL
from tests.unit.parsers.family_cases import FAMILIES, PYTHON
from tests.unit.parsers.habit_cases import HABITS
from tests.unit.parsers.parser_cases import CASES, TOOLS, Case, hermes, parse, with_ids

IDS = [f"{case.tool}-{case.reasoning}-{case.text[:24]!r}" for case in CASES]


def two_way_splits(text: str) -> range:
    """Where a text is cut into two: everywhere with `make test-full`. Otherwise at every third place, beginning at one that
    depends on the text's length: each family has many cases with the same markup."""
    return range(len(text) + 1) if FULL else range(len(text) % 3, len(text) + 1, 3)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_a_text_means(case: Case) -> None:
    assert parse(case.parser(), [case.text]) == case.expected


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_two_way_splits_and_every_character_alone(case: Case) -> None:
    for i in two_way_splits(case.text):
        assert parse(case.parser(), [case.text[:i], case.text[i:]]) == case.expected, i
    assert parse(case.parser(), list(case.text)) == case.expected


IN_PYTHON = (*PYTHON, "llama4_pythonic")
ENDED = [*HABITS, *FAMILIES]


@pytest.mark.parametrize("case", ENDED, ids=[f"{case.tool}-{case.text[-40:]!r}" for case in ENDED])
def test_calls_beside_the_format_are_read_the_same_in_every_split(case: Case) -> None:
    assert parse(case.parser(), [case.text], is_cut=False) == case.expected
    for i in two_way_splits(case.text):
        assert parse(case.parser(), [case.text[:i], case.text[i:]], is_cut=False) == case.expected, i
    assert parse(case.parser(), list(case.text), is_cut=False) == case.expected


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_a_call_that_breaks_off_anywhere_has_arguments_that_are_json_or_as_they_were_written(tool: str) -> None:
    """Unless the family writes calls as in Python: `test_python_reader.py` is about these."""
    for case in (case for case in [*CASES, *ENDED] if case.tool == tool and tool not in IN_PYTHON):
        for end in range(0, len(case.text), 3):
            broken = replace(case, text=case.text[:end])
            check_arguments(parse(broken.parser(), [broken.text], is_cut=False), broken.text)


def check_arguments(events: list[Event], text: str) -> None:
    """Each call has arguments, and they are an object of JSON, or they end as the text has it and are no JSON."""
    num_calls = sum(isinstance(event, ToolCallStart) for event in events)
    arguments = [event.text for event in events if isinstance(event, ToolArgumentsDelta)]
    assert len(arguments) == num_calls
    for each in arguments:
        try:
            assert isinstance(json.loads(each), dict)
        except json.JSONDecodeError:
            assert each[-1:] in text, (each, text)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=12))
def test_any_split(case: Case, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(case.text)) for cut in cuts), len(case.text)]
    pieces = [case.text[start:end] for start, end in pairwise(bounds)]
    assert parse(case.parser(), pieces) == case.expected


_MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    '"name"',
    '"arguments"',
    '"f"',
    "{}",
    '{"name": "f", "arguments": ',
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "<function=f>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="f">',
    "</invoke>",
    '<parameter name="n">',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>f\n```json\n",
    "f<｜tool▁sep｜>",
    "```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call>call:f{",
    "<|tool_call>",
    '<|"|>',
    "a:",
    "<tool_call|>",
    "<|channel>thought",
    "<channel|>",
    "<|start|>assistant",
    "<|channel|>analysis",
    "<|channel|>final",
    " to=functions.f",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<parameter=s>",
    "<parameter=n>",
    "</parameter>",
    "</function>",
    "<",
    "x",
    "é",
    "🙂",
    '"parameters": {"a": 1}}',
]
NAMES = [None, *TOOL_PARSERS]
OWN_JSON = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "gemma4")  # these turn arguments into JSON


@given(
    st.lists(st.sampled_from(_MARKUP), max_size=24),
    st.sampled_from(NAMES),
    st.sampled_from([None, *REASONING]),
    st.booleans(),
    st.integers(1, 7),
)
@example([hermes("f", "{}")], "hermes", None, False, 1)
def test_any_soup_of_markup_is_read_the_same_in_any_split_and_loses_no_text(
    parts: list[str], tool: str | None, reasoning: str | None, is_inside: bool, width: int
) -> None:
    text = "".join(parts)
    case = Case(tool, text, [], reasoning, {"opening": Opening.OPEN if is_inside else Opening.NONE})
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    ended = parse(case.parser(), [text], is_cut=False)
    assert parse(case.parser(), pieces, is_cut=False) == ended
    check_arguments(ended, text)
    events = parse(case.parser(), [text])
    assert parse(case.parser(), pieces) == events
    is_harmony = tool == "openai" or reasoning == "openai_gptoss"
    check_order(events)
    if is_harmony:  # headers between the pieces are left out, even if there are no calls
        rest = iter(text)
        assert all(char in rest for event in events for char in text_of(event) if char != "\n")
        return
    if not any(isinstance(event, ToolCallStart | ReasoningDelta) for event in events) and reasoning is None:
        assert "".join(text_of(event) for event in events) == text
    position = 0
    for event in events:  # what is shown stands in the text, in this order
        shown = event.name if isinstance(event, ToolCallStart) else text_of(event)
        if tool not in OWN_JSON and not isinstance(event, ToolArgumentsDelta):
            position = text.find(shown, position)
            assert position >= 0, (shown, text)


def text_of(event: Event) -> str:
    return "" if isinstance(event, ToolCallStart) else event.text


def check_order(events: list[Event]) -> None:
    """Calls count up, and arguments follow their own call's start."""
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    for before, event in zip([None, *events], events, strict=False):
        if isinstance(event, ToolArgumentsDelta):
            assert isinstance(before, ToolCallStart)
            assert before.index == event.index


def test_events_come_as_soon_as_they_are_sure() -> None:
    parser = with_ids(create_output_parser("hermes", "qwen3", tools=TOOLS), lambda: "id")
    steps: list[tuple[str, list[Event]]] = [
        ("<think>Hm", [ReasoningDelta("Hm")]),
        (" ok", [ReasoningDelta(" ok")]),
        ("</think>", []),
        ("Sure.", [ContentDelta("Sure.")]),
        (" a <", [ContentDelta(" a")]),
        ("b", [ContentDelta(" <b")]),
        ('\n<tool_call>\n{"name": "f", "arguments"', []),
        (": {", [ToolCallStart(0, "id", "f")]),
        ('"s": "' + "x" * (LAG - 6), [ToolArgumentsDelta(0, "{")]),  # arguments come late, so that they can be mended
        ("yz", [ToolArgumentsDelta(0, '"s')]),
        ('"}', [ToolArgumentsDelta(0, '":')]),
        ("}\n</tool_call>", [ToolArgumentsDelta(0, ' "' + "x" * (LAG - 6) + 'yz"}')]),
    ]
    for text, expected in steps:
        assert parser.push(text) == expected, text
    assert parser.finish() == []


def seconds_for(case: Case, pieces: list[str]) -> float:
    """Of this thread alone, and without garbage collections: those depend on what else the process has made."""
    gc.disable()
    start = time.thread_time()
    parser = case.parser()
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    seconds = time.thread_time() - start
    gc.enable()
    return seconds


@pytest.mark.parametrize(
    ("tool", "reasoning", "start", "unit"),
    [
        ("hermes", None, "", "<tool_call"),
        ("hermes", None, "", " "),
        ("hermes", None, "", '<tool_call>{"name": "f", "arguments": {'),
        ("hermes", None, '<tool_call>{"arguments": {"a": "', "\\\\"),
        ("hermes", None, '<tool_call>{"name": "f", "arguments": {"a": ', "["),
        ("hermes", None, '<tool_call>{"name": "f", "arguments": {"a": "🙂', '"'),
        ("llama3_json", None, '{"name": "', "a"),
        ("mistral", None, "[TOOL_CALLS]", "[TOOL_CALLS]f"),
        ("qwen3_coder", None, "<tool_call><function=f><parameter=s>", "\n</param"),
        ("qwen3_coder", None, "<tool_call><function=f><parameter=n>", "1"),
        ("glm45", None, "", "<tool_call>f<arg_key>"),
        ("gemma4", None, '<|tool_call>call:f{s:<|"|>', '<|"|'),
        ("gemma4", None, "<|tool_call>call:f{n:", "1"),
        ("gemma4", None, "<|tool_call>call:f{", "["),
        ("deepseek_v3", None, "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"),
        ("openai", None, "", "<|channel|>"),
        ("openai", "openai_gptoss", "<|channel|>analysis<|message|>", "<|en"),
        ("hermes", "qwen3", "<think>", " </thin"),
        ("hermes", "qwen3", "<think>", "<tool_call>{"),
        ("mistral", None, '[TOOL_CALLS]f{"a": "', f'"{" " * 250}x'),
        ("mistral", None, "[TOOL_CALLS]f{", "[}"),
        ("qwen3_coder", None, "<tool_call><function=f><parameter=s>", "</parameter>\n</function>\n"),
        ("qwen3_coder", None, "<tool_call><function=f><parameter=n>1</parameter>", "<"),
    ],
)
def test_time_is_linear_in_the_text_however_it_comes(tool: str, reasoning: str | None, start: str, unit: str) -> None:
    """Quadratic work would take 16 times as long for 4 times the text; the bound is 8 times, and the best of three counts."""
    case = Case(tool, "", [], reasoning)
    short = start + unit * (12_000 // len(unit))
    long = start + unit * (48_000 // len(unit))
    for split in (list, lambda text: [text]):
        assert any(seconds_for(case, split(long)) < 8 * max(seconds_for(case, split(short)), 1e-4) for _ in range(3))


MAX_BUFFERED = 2**13  # in the tests below, which would take 32 times as long with the one that is served


@pytest.fixture
def buffers_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arguments_reader, buffered_value, event_writer, output_parser):
        assert module.MAX_BUFFERED == 2**18
        monkeypatch.setattr(module, "MAX_BUFFERED", MAX_BUFFERED)


less = pytest.mark.usefixtures("buffers_less")


@less
@pytest.mark.parametrize(
    ("tool", "start", "unit"),
    [
        ("hermes", "", " "),
        ("hermes", '<tool_call>{"name": "', "a"),
        ("hermes", '<tool_call>{"arguments": ', "{"),
        ("hermes", "<tool_call>", " "),
        ("qwen3_coder", "<tool_call><function=f><parameter=n>", "1"),
        ("glm45", "<tool_call>", "1"),
        ("openai", "<|start|>", "<|channel|>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=n>1</parameter>", "x"),
    ],
)
def test_what_waits_is_bounded_and_then_content_in_any_split(tool: str, start: str, unit: str) -> None:
    text = start + unit * (MAX_BUFFERED + 1000) + hermes("f", "{}")
    expected = parse(Case(tool, "", []).parser(), [text])
    assert parse(Case(tool, "", []).parser(), [text[i : i + 997] for i in range(0, len(text), 997)]) == expected
    parser = Case(tool, "", []).parser()
    num_in = num_out = 0
    for i in range(0, len(text), 100):
        num_in += len(text[i : i + 100])
        num_out += sum(len(text_of(event)) for event in parser.push(text[i : i + 100]))
        assert num_in - num_out <= MAX_BUFFERED + 200


# parser -> what a model writes before and behind a value, and of which parameter it is
AROUND = {
    "qwen3_coder": ("<tool_call><function=f><parameter={}>", "</parameter></function></tool_call>"),
    "seed_oss": ("<seed:tool_call><function=f><parameter={}>", "</parameter></function></seed:tool_call>"),
    "glm45": ("<tool_call>f<arg_key>{}</arg_key><arg_value>", "</arg_value></tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="f"><parameter name="{}">',
        "</parameter></invoke></minimax:tool_call>",
    ),
    "gemma4": ("<|tool_call>call:f{{{}:", "}<tool_call|>"),
}
LONG = '{"lines": [' + ", ".join(f'"line {i}: <b> \\n \\u00e9 é"' for i in range(MAX_BUFFERED // 16)) + "]}"


TEXT = "some text " * (MAX_BUFFERED // 8) + "and more"
DIGITS = "1" * (MAX_BUFFERED + 1000)  # more than a number of JSON may have
NUMBER = 12345678901
NUMBERS = "[" + f"{NUMBER}, " * (MAX_BUFFERED // 8) + "2]"
LONG_VALUES: list[tuple[str, str, object]] = [
    *((tool, LONG, json.loads(LONG)) for tool in AROUND if tool != "gemma4"),
    ("gemma4", LONG.replace('"lines"', "lines").replace('"', '<|"|>').replace("\\", ""), None),
    *((tool, TEXT, TEXT) for tool in AROUND if tool != "gemma4"),
    *((tool, NUMBERS, [*[NUMBER] * (MAX_BUFFERED // 8), 2]) for tool in AROUND),
    *((tool, DIGITS, DIGITS) for tool in AROUND if tool != "gemma4"),
]


@less
@pytest.mark.parametrize(
    ("tool", "value", "expected"), LONG_VALUES, ids=[f"{tool}-{value[:12]!r}" for tool, value, _ in LONG_VALUES]
)
def test_a_value_that_is_too_long_to_hold_stays_whole_in_any_split(tool: str, value: str, expected: object) -> None:
    before, after = AROUND[tool]
    text = before.format("o") + value + after
    events = parse(Case(tool, "", []).parser(), [text])
    assert isinstance(events[0], ToolCallStart) and len(events) == 2
    found = json.loads(text_of(events[1]))["o"]
    assert found == expected if expected is not None else len(found["lines"]) == MAX_BUFFERED // 16
    assert parse(Case(tool, "", []).parser(), [text[i : i + 997] for i in range(0, len(text), 997)]) == events
    held = most = 0
    parser = Case(tool, "", []).parser()
    for i in range(0, len(text), 997):
        held += len(text[i : i + 997]) - sum(len(text_of(event)) for event in parser.push(text[i : i + 997]))
        most = max(most, held)
    assert most <= MAX_BUFFERED + 2_000


@pytest.mark.parametrize(
    "text", ["In GLM <tool_call> begins a call, " + "and so on " * 100, "<tool_call>" + "x" * 1000]
)
def test_a_text_that_mentions_a_marker_is_soon_shown(text: str) -> None:
    parser = Case("glm45", "", []).parser()
    held = 0
    for char in text:
        held += 1 - sum(len(text_of(event)) for event in parser.push(char))
        assert held <= 300


@less
def test_a_thought_about_calls_that_is_too_long_to_hold_is_reasoning() -> None:
    thought = f"<tool_call>{{{'a' * MAX_BUFFERED}"
    for end in ("", "</think>"):
        text = f"<think>{thought}{hermes('f', '{}')}{end}"
        events = parse(Case("hermes", "", [], "qwen3").parser(), [text], is_cut=False)
        assert events == [ReasoningDelta(thought + hermes("f", "{}"))]
        pieces = [text[i : i + 997] for i in range(0, len(text), 997)]
        assert parse(Case("hermes", "", [], "qwen3").parser(), pieces, is_cut=False) == events


@less
def test_white_space_before_a_value_that_is_too_long_to_hold_is_left_out() -> None:
    before, after = AROUND["gemma4"]
    for value in ("7", "some text"):
        events = parse(
            Case("gemma4", "", []).parser(), [f"{before.format('n')}{' ' * (MAX_BUFFERED + 9)}{value}{after}"]
        )
        assert json.loads(text_of(events[1])) == {"n": json.loads(as_json(value, RepairBudget()))}


@less
def test_white_space_that_is_too_long_to_hold_is_shown_with_the_text_before_it() -> None:
    text = "a" + " " * (MAX_BUFFERED + 1) + "b"
    assert parse(Case("hermes", "", []).parser(), [text]) == [ContentDelta(text)]


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": None}], "c": True, "d": False},
        ["it's", 'a "b"', 'it\'s "x"', "\\", "\n\t\x07\x7f", "é 東京 🙂", "True", "None 'x"],
        {"path": "C:\\new\\table", "re": r"\d+\s*"},
        {"": [], "k": {}, "f": -1.5e-7, "n": 10**18},
    ],
)
def test_values_of_python_become_json(value: object) -> None:
    assert json.loads(as_json(repr(value), RepairBudget())) == value
    assert as_json(json.dumps(value), RepairBudget()) == json.dumps(value)


@pytest.mark.parametrize("text", ["{1, 2}", "[b'x']", "{'a': f(1)}", "{'a'}", "[1, nan]", "['a\\", "[Truely]", "it's"])
def test_what_is_no_value_of_json_is_a_string(text: str) -> None:
    assert json.loads(as_json(text, RepairBudget())) == text


@pytest.mark.parametrize("unit", ["'", "\\'", '"', "\\", "'\"", "True ", "{"])
def test_a_long_text_that_looks_like_python_takes_linear_time(unit: str) -> None:
    def seconds(num_chars: int) -> float:
        start = time.thread_time()
        as_json("[" + unit * (num_chars // len(unit)), RepairBudget())
        return time.thread_time() - start

    # in quadratic time, 200,000 characters take more than a second on any machine; in linear time, some hundredths of one
    assert any(seconds(200_000) < 8 * max(seconds(50_000), 2e-2) for _ in range(3))


def test_a_value_that_is_nested_too_deep_is_a_string() -> None:
    assert as_json("[" * 100_000, RepairBudget()) == json.dumps("[" * 100_000)


def test_ids_are_of_the_familys_form_and_never_the_same() -> None:
    def ids(tool: str, text: str) -> list[str]:
        parser = create_output_parser(tool, None, tools=TOOLS)
        return [event.id for event in parser.push(text) if isinstance(event, ToolCallStart)]

    found = ids("hermes", hermes("f", "{}") * 50)
    assert len(set(found)) == 50
    assert all(name.startswith("call_") and len(name) == 29 for name in found)
    found = ids("mistral", "[TOOL_CALLS]f{}" * 50)
    assert len(set(found)) == 50
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in found)


@pytest.mark.parametrize("text", ["<tool", '<tool_call>\n{"na', '<tool_call>{"name": "f"'])
def test_a_forced_call_that_a_limit_cuts_before_its_name_is_no_content(text: str) -> None:
    parser = create_output_parser("hermes", "qwen3", tools=TOOLS, only_calls=True)
    assert parse(parser, ["<think>a</think>", text]) == [ReasoningDelta("a")]


def test_what_must_not_be_skipped() -> None:
    def needs(tool: str | None, reasoning: str | None, tools: list[dict[str, object]] | None = TOOLS) -> bool:
        return create_output_parser(tool, reasoning, tools=tools).needs_special_tokens

    assert needs("mistral", None)
    assert needs("llama3_json", None)
    assert needs(None, "mistral")
    assert needs(None, "openai_gptoss", tools=None)
    assert not needs(None, "qwen3")
    assert not needs("mistral", None, tools=None)
    special = {name for name in REASONING if needs(None, name, None)}
    assert special == {
        "openai_gptoss",
        *(name for name, tags in REASONING.items() if "|" in tags.begin and tags.end),
    } | {"hy_v3", "minimax_m3", "mistral"}


def test_names_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser='hermse' .*apertus"):
        create_output_parser("hermse", None, tools=TOOLS)
    with pytest.raises(ConfigError, match=r"reasoning_parser='r1' .*hunyuan"):
        create_output_parser(None, "r1", tools=None)


def test_joining_keeps_calls_apart() -> None:
    events: list[Event] = [
        ContentDelta("a"),
        ContentDelta("b"),
        ReasoningDelta("c"),
        ToolCallStart(0, "i", "f"),
        ToolCallStart(1, "j", "g"),
        ToolArgumentsDelta(1, "{"),
        ToolArgumentsDelta(1, "}"),
        ContentDelta("d"),
    ]
    assert join_deltas(events) == [
        ContentDelta("ab"),
        ReasoningDelta("c"),
        ToolCallStart(0, "i", "f"),
        ToolCallStart(1, "j", "g"),
        ToolArgumentsDelta(1, "{}"),
        ContentDelta("d"),
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_arguments_are_passed_on_to_the_character(value: object) -> None:
    arguments = json.dumps({"a": value}, ensure_ascii=False)
    events = parse(Case("hermes", "", []).parser(), list(hermes("f", arguments)))
    assert events == [ToolCallStart(0, "id0", "f"), ToolArgumentsDelta(0, arguments)]
