"""Damaged calls: what is read of them is what was meant, or no valid call."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from inflight.interface.events import ContentDelta, Event, ToolArgumentsDelta, ToolCallStart
from tests.unit.parsers.damage import (
    GEMMA_QUOTE,
    Damage,
    as_gemma,
    damages,
    parse_call,
    parse_gemma,
    parse_object,
    python_forms,
    random_arguments,
    readings,
)
from tests.unit.parsers.family_cases import M3, element, m3
from tests.unit.parsers.parser_cases import Case, parse

IS_FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
NUM_CALLS = 10_000 if IS_FULL else 52
NAME = "run"


@dataclass(frozen=True)
class Family:
    """How a family writes a call.

    Attributes:
        around: the text before and behind what is damaged.
        body: makes the text that is damaged, of the arguments' JSON.
        key: the only argument of the call, if its value is what is damaged. A value that is passed on as text counts as no
        call.
        quote: around strings.
    """

    around: tuple[str, str]
    body: str = "{}"
    parse: Callable[[str], object] = parse_object
    key: str = ""
    quote: str = '"'

    def damaged(self, arguments: str) -> str:
        return self.body.replace("{}", arguments)


FRAME = f'{{"name": "{NAME}", "arguments": {{}}}}'
FAMILIES = [
    ("hermes", Family(("<tool_call>\n", "\n</tool_call>"), FRAME, parse_call)),
    ("hermes", Family(("Look: <tool_call>", "</tool_call>\nDone."), FRAME, parse_call)),
    ("llama3_json", Family(("", ""), FRAME.replace("arguments", "parameters"), parse_call)),
    ("mistral", Family(("[TOOL_CALLS] [", "]"), FRAME, parse_call)),
    ("mistral", Family((f"[TOOL_CALLS]{NAME}", ""))),
    ("mistral", Family((f"[TOOL_CALLS]{NAME}[ARGS]", "[TOOL_CALLS]next{}"))),
    (
        "deepseek_v3",
        Family(
            (
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            )
        ),
    ),
    (
        "deepseek_v31",
        Family(
            (
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            )
        ),
    ),
    ("openai", Family((f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>", "<|call|>"))),
]
FAMILIES += [
    (tool, Family((before, after), body="{}", key="x"))
    for tool, before, after in (
        (
            "qwen3_coder",
            f"<tool_call>\n<function={NAME}>\n<parameter=x>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "seed_oss",
            f"<seed:tool_call>\n<function={NAME}>\n<parameter=x>",
            "</parameter>\n</function>\n</seed:tool_call>",
        ),
        ("glm45", f"<tool_call>{NAME}\n<arg_key>x</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
        (
            "minimax_m2",
            f'<minimax:tool_call>\n<invoke name="{NAME}">\n<parameter name="x">',
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
    )
]
FAMILIES += [
    (tool, Family((before, after), FRAME.replace("arguments", key), parse_call))
    for tool, before, after, key in (
        ("jamba", "<tool_calls>[", "]</tool_calls>", "arguments"),
        ("nemotron_json", "<TOOLCALL>[", "]</TOOLCALL>", "arguments"),
        ("nemotron_mini", "<toolcall> ", " </toolcall>", "arguments"),
        ("granite", "<|tool_call|>[", "]", "arguments"),
        ("granite-20b-fc", "<function_call> ", "", "arguments"),
        ("phi4_mini_json", "functools[", "]", "arguments"),
        ("phi4_mini_json", "<|tool_call|>[", "]<|/tool_call|>", "arguments"),
        ("internlm", "<|action_start|><|plugin|>", "<|action_end|>", "parameters"),
        ("gigachat3", "<|function_call|>", "", "arguments"),
        ("xlam", "[", "]", "arguments"),
        ("llama4_json", "<|python_start|>", "", "parameters"),
        ("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>", "arguments"),
    )
]
FAMILIES += [
    (tool, Family((before, after)))
    for tool, before, after in (
        (
            "kimi_k2",
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            "kimi_k3",
            f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        ("functionary_v3_1", f"<function={NAME}>", "</function>"),
        ("functionary_v3_2", f">>>{NAME}\n", ""),
        ("llama3_json", f"<function={NAME}>", "</function>"),
    )
]
FAMILIES += [("gemma4", Family((f"<|tool_call>call:{NAME}", "<tool_call|>"), parse=parse_gemma, quote=GEMMA_QUOTE))]
FAMILIES += [
    (tool, Family((before, after), key="x"))
    for tool, before, after in (
        (
            "deepseek_v32",
            f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{NAME}">\n<｜DSML｜parameter name="x" string="false">',
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        (
            "longcat",
            f"<longcat_tool_call>{NAME}\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n</longcat_tool_call>",
        ),
        ("minicpm5", f'<function name="{NAME}"><param name="x">', "</param></function>"),
        (
            "zaya_xml",
            f"<zyphra_tool_call>\n<function={NAME}>\n<parameter=x>\n",
            "\n</parameter>\n</function>\n</zyphra_tool_call>",
        ),
        (
            "solar_open2",
            f"<|tool_call:start|>{NAME}\n<|tool_arg:start|>x<|tool_arg:value|>",
            "<|tool_arg:end|>\n<|tool_call:end|>",
        ),
        (
            "minimax_m3",
            f'{M3}<tool_call>\n{M3}<invoke name="{NAME}">{M3}<x>',
            f"{M3}</x>{M3}</invoke>\n{M3}</tool_call>",
        ),
        (
            "kimi_k3",
            f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|>'
            '<|open|>argument key="x" type="object"<|sep|>',
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
    )
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": NAME, "parameters": {"type": "object", "properties": {"x": {"type": "object"}}}},
}


def found_calls(events: list[Event]) -> list[tuple[str, str]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [event.text for event in events if isinstance(event, ToolArgumentsDelta)]
    return list(zip(names, texts, strict=True))


def damaged_calls(
    family: Family, arguments: dict[str, Any], draw: random.Random
) -> tuple[object, list[Damage]]:  # Any: JSON
    """What a call with these arguments means, and the call with one damage of each kind."""
    if family.quote == GEMMA_QUOTE:
        # Words have no quotes here. So a comma or a colon that is missing or moved leaves other words, which nobody can see.
        written = as_gemma(arguments)
        found = damages(written, draw, signs="{}[]", quote=GEMMA_QUOTE)
        kinds = ("dropped", "doubled", "comma at the end")
        return family.parse(written), [each for each in found if each.kind in kinds and each.text.startswith("{")]
    written = json.dumps(arguments, ensure_ascii=draw.random() < 0.2, separators=draw.choice([None, None, (",", ":")]))
    cases = [*damages(family.damaged(written), draw)]
    cases += [type(each)(each.kind, family.damaged(each.text), each.is_clear) for each in python_forms(arguments)]
    return family.parse(family.damaged(written)), cases


@pytest.mark.parametrize(("tool", "family"), FAMILIES, ids=[f"{tool}-{i}" for i, (tool, _) in enumerate(FAMILIES)])
def test_a_damaged_call_is_mended_or_no_valid_call(
    tool: str, family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(f"damage of {family.around}")
    one, mended = Counter[str](), Counter[str]()
    num_calls = 0
    missed: list[str] = []
    while num_calls < NUM_CALLS // len(FAMILIES) + 1:
        arguments = random_arguments(draw)
        meant, cases = damaged_calls(family, arguments, draw)
        for damage in cases:
            if family.parse(damage.text) is not None:
                continue  # still valid
            num_calls += 1
            text = damage.text.join(family.around)
            case = Case(tool, text, [], options={"tools": [TOOL]})
            events = parse(case.parser(), [text], is_cut=False)
            pieces = draw.choice([list(text), [text[i : i + 7] for i in range(0, len(text), 7)]])
            assert parse(case.parser(), pieces, is_cut=False) == events, text
            calls = found_calls(events)
            expected = {family.key: arguments} if family.key else arguments
            is_mended = bool(calls) and calls[0][0] == NAME and parse_object(calls[0][1]) == expected
            for name, found in (call for call in calls if call[0] != "next"):
                value = parse_object(found)
                is_text = value is not None and isinstance(value.get(family.key), str)
                assert value is None or is_text or (name, value) == (NAME, expected), (damage, arguments, found)
            finds_readings = IS_FULL or (tool, family) in FAMILIES[:6]  # trying all edits takes long
            if damage.is_clear or (finds_readings and [meant] == readings(damage.text, family.parse)):
                one[damage.kind] += 1
                mended[damage.kind] += is_mended
                if not is_mended:
                    missed.append(f"{damage.kind}: {text!r} -> {calls}")
    with capsys.disabled():
        shares = ", ".join(f"{kind} {mended[kind]}/{one[kind]}" for kind in one)
        print(
            f"\n{tool}: {num_calls} damaged calls, {mended.total()} of {one.total()} with one reading mended ({shares})"
        )
    assert mended.total() >= 0.95 * one.total() - 2, "\n".join(missed[:20])


@pytest.mark.parametrize(
    "text",
    [
        '{“n": 1}',  # a typographic quote instead of a plain one
        '{"n“: 1, "s": "x"}',
        '{"n": “x", "s": 1}',
        '{"s": ["", “x y"]}',
        '{"s": [26， "x", 1]}',
        '{"s"： 1, "n": 2}',
        '{"n":s": 1}',  # a part of a text that is written twice
        '{"n{"n": 1}',
        '{"b": [{"n": o": 1}, 2]}',
        '{"s": "x", "n" 1, "b" [2]}',  # two signs are missing
        '{"b": [], "n": [{"s"',
        '{"b":["x",529,],"s":"y"}',  # the comma may come from the middle of the number
        '{"b": {"n": 23}5, "s": 1}',  # the brace may belong behind the number
        '{"n",: " and more"}',  # the comma may come from the string
        '{"s": "x [1}",] "n": 2}',  # so may the bracket
        '{"s": " {x: [1]"}}',
        '{"b": {"o": {"n": true}}, "s": "x"}}',  # any of the braces may be too many
        '{"s":  x {1}", "n": 2}',  # the string may begin with white space
        # two signs are at a wrong place, so the only reading with one edit is another call
        '{"b": 28,}85',
        '{"s": "",,, "n": 1}',
        '{"s": [[] -",rf, and more"]}',
        '{s"b:"{}, "n": 1}',
        '{"s": -2;7 "b": "x"}',
        '{"s": "x" y, "n// note\n": 1}',
    ],
)
def test_what_has_no_certain_reading_is_passed_on_as_it_was_written(text: str) -> None:
    case = Case("hermes", f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>', [])
    for pieces in ([case.text], list(case.text)):
        [(name, arguments)] = found_calls(parse(case.parser(), pieces, is_cut=False))
        assert name == "f" and parse_object(arguments) is None


def test_tags_in_a_value_that_do_not_fit_together_are_a_text() -> None:
    meant = {"a": [1, "x"], "k": "it"}
    inside = element("a", element("item", "1") + element("item", "x")) + element("k", "it")
    pieces = [each for each in re.split(f"({re.escape(M3)}</?[a-z]+>)", inside) if each]
    tags = [i for i, piece in enumerate(pieces) if piece.startswith(M3)]
    dropped = [pieces[:i] + pieces[i + 1 :] for i in tags]
    doubled = [pieces[:i] + pieces[i:][:1] + pieces[i:] for i in tags]
    for damaged in (pieces, *dropped, *doubled):
        text = m3(element("o", "".join(damaged)))
        [(_, arguments)] = found_calls(parse(Case("minimax_m3", text, []).parser(), list(text), is_cut=False))
        found = parse_object(arguments)
        assert found is not None and found == {"o": meant if damaged == pieces else "".join(damaged)}


def test_typographic_quotes_inside_a_text_do_not_hinder_a_repair() -> None:
    case = Case("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a “b” c，d" "n": 1,}}</tool_call>', [])
    [(_, arguments)] = found_calls(parse(case.parser(), [case.text], is_cut=False))
    assert parse_object(arguments) == {"s": "a “b” c，d", "n": 1}


@pytest.mark.parametrize("separator", ["; ", ";", ", ", "\n", " "])
def test_a_damaged_call_before_other_calls_is_mended(separator: str) -> None:
    damaged = '{"name": "f", "parameters": {"s": "a", "n" 1}}'
    text = separator.join([damaged, damaged, '{"name": "f", "parameters": {"s": "b", "n": 2}}'])
    found = found_calls(parse(Case("llama3_json", text, []).parser(), [text], is_cut=False))
    assert [parse_object(arguments) for _, arguments in found] == [{"s": "a", "n": 1}] * 2 + [{"s": "b", "n": 2}]


def test_what_stands_behind_arguments_may_belong_to_them() -> None:
    for text in ('{"n": 235}1', '{"n": 23}51', '{"b": tru}e'):
        case = Case("mistral", f"[TOOL_CALLS]f{text}", [])
        [(_, arguments)] = found_calls(parse(case.parser(), list(case.text), is_cut=False))
        assert parse_object(arguments) in (None, {"b": True})
    case = Case("mistral", '[TOOL_CALLS]f{"n": 235}\nDone', [])
    [(_, arguments)] = found_calls(parse(case.parser(), list(case.text), is_cut=False))
    assert parse_object(arguments) == {"n": 235}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"n": 1}/* a, b */}',
        '{"name": "f", "arguments": {"n": 1} // a * b\n}',
        '{"name": "f" /* x */, "arguments": {"n": 1}, # y\n "id": "z"}',
        '{"name": "f", "arguments": {"n": 1}}}}',
        '{"function": {"name": "f", "arguments": {"n": 1}}}',
    ],
)
def test_notes_and_braces_around_arguments_are_left_out(text: str) -> None:
    for tool, around in (("hermes", "<tool_call>{}</tool_call>"), ("jamba", "<tool_calls>[{}]</tool_calls>")):
        case = Case(tool, around.replace("{}", text), [])
        for pieces in ([case.text], list(case.text)):
            events = parse(case.parser(), pieces, is_cut=False)
            assert found_calls(events) == [("f", '{"n": 1}')]
            assert not any(isinstance(event, ContentDelta) for event in events)
