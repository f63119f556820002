"""Roles that a template does not write: their messages become the user's."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.tokenizer.chat_template import ChatTemplate

ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOSES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'critic'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "u"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "a"}


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate({"default": source}).render(list(messages), add_generation_prompt=False)


@pytest.mark.parametrize(
    ("source", "role", "shown"),
    [
        (ANY, "document", "<document>x"),
        (LOSES, "critic", "<critic>x"),
        (LOSES, "document", "<user>document: x"),
        (REFUSES, "document", "document: x"),
        (REFUSES, "critic", "critic: x"),
    ],
)
def test_a_message_is_never_lost(source: str, role: str, shown: str) -> None:
    other = {"role": role, "content": "x"}
    for messages in ([USER, ANSWER, other], [other, USER], [USER, other, ANSWER, USER], [USER, ANSWER, other, USER]):
        prompt = rendered(source, *messages)
        assert shown in prompt and prompt.count("<user>") + prompt.count("<assistant>") >= 1
    parts = {"role": role, "content": [{"type": "text", "text": "x"}]}
    assert shown in rendered(source, USER, ANSWER, parts)


def test_many_roles_cost_no_more_than_a_few() -> None:
    renders = []
    template = ChatTemplate({"default": LOSES})
    form = template._forms["default"]
    writes = form._other_roles._writes
    form._other_roles._writes = lambda role: renders.append(role) or writes(role)  # type: ignore[method-assign,func-returns-value]
    messages = [{"role": f"role{i}", "content": str(i)} for i in range(200)]
    prompt = template.render(messages, add_generation_prompt=False)
    assert all(f"role{i}: {i}" in prompt for i in range(200))
    assert len(renders) < 20
