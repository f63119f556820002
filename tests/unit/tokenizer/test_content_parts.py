"""Parts of a message's content reach a template in the form that it reads: as a list, or as one text."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate

TURN = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}"
# Kimi K2: a macro reads the content into a variable, and writes the parts one behind the other
KIMI = (
    "{% macro render(m) %}{% set c = m.get('content') %}{% if c is string %}{{ c }}{% elif c is not none %}"
    "{% for part in c %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
) + TURN.replace("BODY", "{{ render(m) }}")
PLAIN = TURN.replace("BODY", "{{ m.content }}")
LOOP = TURN.replace(
    "BODY",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}",
)
# GLM-4.6 and others: only what the user says is read in parts, and objects are written as they are
OF_THE_USER = TURN.replace(
    "BODY",
    "{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
)
AS_JSON = TURN.replace("BODY", "{{ m.content if m.content is string else m.content | tojson }}")
FIRST_ONLY = TURN.replace("BODY", "{{ m.content if m.content is string else m.content[0].text }}")
THOUGHT = TURN.replace(
    "BODY",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
)
FIELD = TURN.replace("BODY", "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}")

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def turn(role: str) -> list[dict[str, Any]]:
    question = {"role": "user", "content": "?"}
    if role == "tool":
        call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}
        return [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return [] if role in ("user", "system") else [question]


@pytest.mark.parametrize(
    ("source", "roles", "expected"),
    [
        (KIMI, ("user", "system", "assistant", "tool"), "ab"),
        (PLAIN, ("user", "system", "assistant", "tool"), "a\nb"),
        (LOOP, ("user", "system", "assistant", "tool"), "[a][b]"),
        (OF_THE_USER, ("user",), "ab"),
        (OF_THE_USER, ("system", "assistant", "tool"), "a\nb"),
        (AS_JSON, ("user", "tool"), "a\nb"),
        (FIRST_ONLY, ("user", "tool"), "a\nb"),
    ],
)
def test_each_role_has_its_form(source: str, roles: tuple[str, ...], expected: str) -> None:
    template = ChatTemplate({"default": source})
    for role in roles * 2:
        prompt = template.render([*turn(role), {"role": role, "content": PARTS}], add_generation_prompt=False)
        assert prompt.endswith(f"<{role}>{expected}"), role
    assert PARTS == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_template_that_refuses_the_probe_is_judged_by_its_loops() -> None:
    for source in (KIMI, LOOP):
        refuses = "{% if messages[0].content != 'start' %}{{ raise_exception('start') }}{% endif %}" + source
        prompt = ChatTemplate({"default": refuses}).render(
            [{"role": "user", "content": "start"}, {"role": "assistant", "content": PARTS}], add_generation_prompt=False
        )
        assert prompt.endswith("[a][b]" if source == LOOP else "a\nb")


@pytest.mark.parametrize(
    ("source", "thinking", "expected"),
    [
        (THOUGHT, "hm", "[THINK]hm[/THINK]ab"),
        (THOUGHT, [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}], "[THINK]hm[/THINK]ab"),
        (FIELD, "hm", "(hm)a\nb"),
        (FIELD, [{"type": "text", "text": "hm"}], "(hm)a\nb"),
        (PLAIN, "hm", "a\nb"),
        (KIMI, "hm", "ab"),
    ],
)
def test_thoughts_that_are_parts(source: str, thinking: object, expected: str) -> None:
    part = {"type": "thinking", "thinking": thinking, "signature": "x"}
    answer = {"role": "assistant", "content": [part, *PARTS]}
    prompt = ChatTemplate({"default": source}).render([*turn("assistant"), answer], add_generation_prompt=False)
    assert prompt == f"<user>?<assistant>{expected}"


def test_a_thought_beside_a_field_with_thoughts() -> None:
    answer = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "no"}, *PARTS],
        "reasoning_content": "yes",
    }
    prompt = ChatTemplate({"default": FIELD}).render([*turn("assistant"), answer], add_generation_prompt=False)
    assert prompt == "<user>?<assistant>(yes)a\nb"


@pytest.mark.parametrize(
    ("role", "part", "words"),
    [
        ("user", {"type": "thinking", "thinking": "hm"}, "'thinking'; this model reads 'text' parts only"),
        ("assistant", {"type": "thinking"}, "of type 'thinking' without a text"),
        ("assistant", {"type": "thinking", "thinking": [{"type": "image"}]}, r"\['thinking'\]\[0\] is of type 'image'"),
        ("assistant", {"type": "thinking", "thinking": [{"type": "text"}]}, "without a string 'text'"),
    ],
)
def test_malformed_thoughts(role: str, part: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ChatTemplate({"default": PLAIN}).render([{"role": role, "content": [part]}])


def test_an_answer_that_ends_in_a_thought_cannot_be_continued() -> None:
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
    with pytest.raises(InvalidRequestError, match="no content to continue"):
        ChatTemplate({"default": THOUGHT}).render(
            [*turn("assistant"), answer], add_generation_prompt=False, continue_final_message=True
        )
