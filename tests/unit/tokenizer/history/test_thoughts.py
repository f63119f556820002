"""Thoughts as a field and as parts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tokenizer.history.small_templates import ALTERNATES, END, LOOP, call, calling, render, result, user

# as Ministral 3 Reasoning
PARTS = (
    LOOP + "{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{{ '<' ~ part.thinking ~ '>' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.values() | join }}){% endfor %} " + END
)
FIELD = ALTERNATES.replace("{{ m.content", "{{ '<' ~ m.reasoning_content ~ '>' if m.reasoning_content }}{{ m.content")
# as Qwen3: thoughts before the last question are left out
LATE_FIELD = FIELD.replace("if m.reasoning_content", "if m.reasoning_content and (loop.last or m.tool_calls)")
THOUGHTS: list[dict[str, Any]] = [
    {"content": "So.", "reasoning_content": "Hm."},
    {"content": "So.", "reasoning": "Hm."},
    {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So."}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "So."}]},
]


@pytest.mark.parametrize("fields", THOUGHTS)
@pytest.mark.parametrize("source", [PARTS, FIELD, LATE_FIELD])
def test_a_template_gets_them_in_its_form(source: str, fields: dict[str, Any]) -> None:
    assert render(source, [user(), {"role": "assistant", **fields}]) == "u:? a:<Hm.>So."
    assert render(source, [user(), calling(call("x", "one"), **fields), result("1", "one")]) == "u:? a:<Hm.>So.(x) t:1"


@pytest.mark.parametrize("content", [None, "", [], [{"type": "thinking", "thinking": "Hm."}]])
def test_a_thought_without_an_answer(content: Any) -> None:
    fields = {"content": content, **({} if content else {"reasoning_content": "Hm."})}
    for source in (PARTS, FIELD):
        assert render(source, [user(), {"role": "assistant", **fields}]) == "u:? a:<Hm.>"
        assert render(source, [user(), calling(call("x", "one"), **fields), result("1", "one")]) == "u:? a:<Hm.>(x) t:1"
