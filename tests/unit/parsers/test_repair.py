"""Damaged calls: what is read of them is what was meant, or no valid call."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from inflight.interface.events import Event, ToolArgumentsDelta, ToolCallStart
from tests.unit.parsers.damage import damages, parse_call, parse_object, python_forms, random_arguments, readings
from tests.unit.parsers.parser_cases import Case, parse

NUM_CALLS = 10_000 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 52
NAME = "run"


@dataclass(frozen=True)
class Family:
    """How a family writes a call.

    Attributes:
        around: the text before and behind what is damaged.
        body: makes the text that is damaged, of the arguments' JSON.
        key: the only argument of the call, if its value is what is damaged. A value that is passed on as text counts as no
        call.
    """

    around: tuple[str, str]
    body: str = "{}"
    parse: Callable[[str], object] = parse_object
    key: str = ""

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
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": NAME, "parameters": {"type": "object", "properties": {"x": {"type": "object"}}}},
}


def found_calls(events: list[Event]) -> list[tuple[str, str]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [event.text for event in events if isinstance(event, ToolArgumentsDelta)]
    return list(zip(names, texts, strict=True))


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
        written = json.dumps(
            arguments, ensure_ascii=draw.random() < 0.2, separators=draw.choice([None, None, (",", ":")])
        )
        meant = family.parse(family.damaged(written))
        cases = [*damages(family.damaged(written), draw)]
        cases += [type(each)(each.kind, family.damaged(each.text), each.is_clear) for each in python_forms(arguments)]
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
            if damage.is_clear or [meant] == readings(damage.text, family.parse):
                one[damage.kind] += 1
                mended[damage.kind] += is_mended
                if not is_mended:
                    missed.append(f"{damage.kind}: {text!r} -> {calls}")
    with capsys.disabled():
        shares = ", ".join(f"{kind} {mended[kind]}/{one[kind]}" for kind in one)
        print(
            f"\n{tool}: {num_calls} damaged calls, {mended.total()} of {one.total()} with one reading mended ({shares})"
        )
    assert mended.total() >= 0.95 * one.total() - 1, "\n".join(missed[:20])
