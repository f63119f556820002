"""Arguments of calls reach a template in the form that it can write: an object, or the text of one."""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.call_arguments import called_with_objects
from inflight.tokenizer.chat_template import ChatTemplate

LOOP = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
END = "{% endfor %}{% endfor %}"
ARGUMENTS = {"city": "Köln", "n": [1, None]}
TEXT = '{"city": "Köln", "n": [1, null]}'
MESSAGES = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ARGUMENTS}}],
    },
]


@pytest.mark.parametrize(
    ("call", "prompt"),
    [
        ("{{ a | tojson }}", TEXT),
        ("{{ a if a is string else a | tojson }}", TEXT),
        ("{% for k, v in a.items() %}{{ k }}={{ v | tojson }};{% endfor %}", 'city="Köln";n=[1, null];'),
        ("{{ 'call ' + a }}", f"call {TEXT}"),  # DeepSeek V3: an object is an error
        ("{{ 'call ' ~ a }}", f"call {TEXT}"),  # an object becomes Python text
        # Mistral's generator: an object escapes what is around it
        ("{% if a is not string %}{% set a = a | tojson | safe %}{% endif %}{{ '\"call\"' + a }}", f'"call"{TEXT}'),
        ("{{ a if a is string else raise_exception('text only') }}", TEXT),
    ],
)
def test_each_template_writes_json(call: str, prompt: str) -> None:
    template = ChatTemplate({"default": LOOP + call + END})
    for _ in range(2):
        assert template.render(MESSAGES, add_generation_prompt=False) == f"?{prompt}"
    assert MESSAGES[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS  # type: ignore[index]


def test_named_templates_are_asked_one_by_one() -> None:
    template = ChatTemplate({"default": LOOP + "{{ '' + a }}" + END, "tool_use": LOOP + "{{ a | tojson }}" + END})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert template.render(MESSAGES) == template.render(MESSAGES, tools=[tool]) == f"?{TEXT}"


def test_a_template_that_writes_no_calls_is_left_alone() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    assert template.render(MESSAGES) == "?"
    with pytest.raises(InvalidRequestError, match="never"):
        ChatTemplate({"default": "{{ raise_exception('never') }}"}).render(MESSAGES)


def test_malformed_calls_are_no_calls_with_objects() -> None:
    for calls in (None, [], "x", [3], [{"function": "f"}], [{"function": {"arguments": "{}"}}], {"a": 1}):
        assert called_with_objects([{"role": "assistant", "tool_calls": calls}]) == []
