"""What a message of the assistant without text gets as its content."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tokenizer.history.small_templates import END, LOOP, call, calling, conversation, render, result, user

EMPTY: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.arguments.a }}{{ c.function.arguments.text }}){% endfor %} "


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{{ m.content | tojson }}",  # LFM2
        "{{ m.content if m.content is string else m.content | tojson }}",
        "{{ m['content'] + '' }}",
        "{{ raise_exception('null') if m.content is none else m.content }}",
        "{{ raise_exception('text') if m.content is string and m.tool_calls else m.content or '' }}",
        "{{ raise_exception('given') if m.content is defined and m.tool_calls else m.content or '' }}",
        "{{ raise_exception('empty') if not m.content and not m.tool_calls else '' if not m.content or m.content is not string "
        "else m.content }}",  # Ministral 3
    ],
)
@pytest.mark.parametrize("empty", EMPTY)
def test_no_absent_value_is_written(content: str, empty: dict[str, Any]) -> None:
    source = LOOP + "{{ m.role[0] }}:" + content + CALLS + END
    turn = {**{k: v for k, v in calling(call("x", "one")).items() if k != "content"}, **empty}
    for messages in (
        [user(), turn, result("1", "one")],
        [user(), {"role": "assistant", **empty}, user("!")],
        [user(), {"role": "assistant", "reasoning_content": "Hm.", **empty}, user("!")],
    ):
        text = render(source, messages)
        assert not {"None", "null", "undefined", "[]"} & set(text.replace(":", " ").replace("(", " ").split()), text
        assert "(x)" in text or "!" in text


def test_a_template_may_write_null_for_another_reason() -> None:
    source = LOOP + "{{ m.role[0] }}:{{ m.content }}" + CALLS + "{% if m.role == 'tool' %}error: null {% endif %}" + END
    assert render(source, [user(), calling(call("x", "one")), result("1", "one")]) == "u:? a:(x) t:1 error: null"


def test_null_is_the_first_choice_beside_calls() -> None:
    source = LOOP + "{{ 'none' if m.content is none else m.content }}" + CALLS + END
    assert render(source, [user(), calling(call("x"), content=None), result("1")]) == "? none(x) 1"
    assert render(source, [user(), calling(call("x"), content=""), result("1")]) == "? (x) 1"
    assert render(source, [*conversation("ua"), {"role": "assistant", "content": None}]).split() == ["0", "1"]


def test_a_template_that_writes_calls_only_beside_null_and_as_text_gets_both() -> None:
    """As that of DeepSeek-R1-Distill-Llama."""
    calls = "{% for c in m.tool_calls %}({{ c.function.name + c.function.arguments }}){% endfor %}"
    source = (
        LOOP + "{% if m.content is none %}" + calls + "{% else %}{{ m.role[0] + ':' + m.content }}{% endif %} " + END
    )
    for content in (None, ""):
        found = render(source, [user(), calling(call("x", "one"), content=content), result("1", "one")])
        assert found == 'u:? (f{"a": "x"}) t:1'
