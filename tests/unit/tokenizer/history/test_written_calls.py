"""Templates that write no calls get them as text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tokenizer.history.small_templates import TAKES_ALL, TWO_ROLES, call, calling, render, result, user

NO_CALLS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LIST = "{% if tools %}HOW {{ tools | tojson }} {% endif %}"
HERMES = LIST.replace("HOW", 'Call <tool_call>{"name": "x", "arguments": {"a": 1}}</tool_call>') + NO_CALLS
LFM2 = LIST.replace("HOW", "<|tool_list_start|>") + NO_CALLS
ARGUMENTS: dict[str, Any] = {"a": 'x"', "b": [1, None], "c": {"d": True}}


def messages(content: Any = None) -> list[dict[str, Any]]:
    made = call("x", "one")
    made["function"]["arguments"] = ARGUMENTS
    return [user(), calling(made, call("y", "two"), content=content), result("1", "one")]


def test_a_readable_line_for_each_call() -> None:
    text = render(NO_CALLS, messages())
    assert text == 'u:? a:Tool call: f({"a": "x\\"", "b": [1, null], "c": {"d": true}})\nTool call: f({"a": "y"}) t:1'
    assert "a:So.+Tool call: f(" in render(NO_CALLS, messages("So."))


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            HERMES,
            'a:<tool_call>\n{"name": "f", "arguments": {"a": "x\\"", "b": [1, null], "c": {"d": true}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {"a": "y"}}\n</tool_call> t:1',
        ),
        (LFM2, 'a:<|tool_call_start|>[f(a="x\\"", b=[1, None], c={"d": True}), f(a="y")]<|tool_call_end|> t:1'),
    ],
)
def test_the_form_that_the_list_of_tools_shows(source: str, wanted: str) -> None:
    assert render(source, messages(), tools=TOOLS).endswith(wanted)


def test_a_role_for_results_that_is_refused() -> None:
    assert render(TWO_ROLES, [user(), calling(call("x", "one")), result("1", "one")]) == (
        'u:? a:Tool call: f({"a": "x"}) u:Tool result (f): 1'
    )


def test_a_template_with_calls_writes_them_itself() -> None:
    assert render(TAKES_ALL, [user(), calling(call("x", "one"), content="!"), result("1", "one")]) == "u:? a:!(x) t:1"


def test_the_tools_of_a_template_with_another_name_for_them() -> None:
    source = HERMES.replace("if tools", "if xml_tools").replace("tools |", "xml_tools |")
    text = render(source, messages(), tools=TOOLS)
    assert '"name": "f"}' in text and "<tool_call>\n" in text
