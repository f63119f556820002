"""What the chat template sees of a request's messages; what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from inflight.entrypoints.fields.messages import ChatMessage, read_arguments, template_messages
from inflight.parsers.surrogates import without_lone_surrogates
from inflight.tokenizer.chat_template import ChatTemplate


def called(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}, "type": None, "index": 0}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "refusal": "no",
        "annotations": [1],
        "audio": {},
    }
    return template_messages([ChatMessage.model_validate(message)])


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "\\ud83d\\ude42"}', {"a": "🙂"}),
        ('{"a": "x\\ud800", "\\udfff": "\\\\ud800"}', {"a": "x\ufffd", "\ufffd": "\\ud800"}),
        ({"a": 1}, {"a": 1}),
        ([], {}),
        ("", {}),
        (None, {}),
        ("{}", {}),
    ],
)
def test_arguments_are_objects(arguments: object, seen: object) -> None:
    (message,) = called(arguments)
    function = {"name": "f", "arguments": seen}
    assert message == {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


MALFORMED = [
    '{"city": "',
    '{"city": "Par',
    '{"a": "\\ud800", "city": "Par\\ud8',
    '{"a": 1, "b": [1, {"c"',
    '{"oops',
    "oops",
    '{"a": 1}}',
    "[1]",
    "[" * 100_000,
    '{"city": NaN}',
    '{"city": [-Infinity]}',
    '{"city": 1e999}',
    '{"city": {"a": -1e999',
]


@pytest.mark.parametrize("text", MALFORMED, ids=[text[:12] for text in MALFORMED])
def test_malformed_arguments_stay_as_the_model_has_written_them(text: str) -> None:
    (call,) = called(text)[0]["tool_calls"]
    assert call["function"]["arguments"] == without_lone_surrogates(text)
    read = read_arguments(text)
    assert read == {"INVALID_JSON": text}
    assert called(read) == called(text), "also when they come back"


def test_arguments_are_read() -> None:
    assert read_arguments('{"a": "x\\ud800"}') == {"a": "x\ufffd"}
    assert read_arguments("") == read_arguments(" ") == read_arguments("{}") == {}
    own = {"INVALID_JSON": "x", "a": 1}
    assert called(own)[0]["tool_calls"][0]["function"]["arguments"] == own


LOOP = "{% for m in messages %}{% for c in m.tool_calls %}"
ENDS = "{% endfor %}{% endfor %}"
TEMPLATES = {
    "text": (
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        '{"city": "',
    ),
    "json": ("{{ c.function.arguments | tojson }}", '{"city": ""}'),
    "members": ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "city=;"),
}


def rendered_call(source: str) -> str:
    """What a template makes of a call with malformed arguments."""
    return ChatTemplate({"default": source}).render(called('{"city": "'))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_gets_text_where_it_writes_it_as_it_is(kind: str) -> None:
    body, expected = TEMPLATES[kind]
    assert rendered_call(f"{LOOP}{body}{ENDS}") == expected


def test_a_template_that_refuses_the_messages_refuses_them() -> None:
    with pytest.raises(ValueError, match="no"):
        rendered_call("{{ raise_exception('no') }}")


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "hm"}]])
def test_a_thought_of_the_assistant(thinking: object) -> None:
    """In both forms that clients send back."""
    part = {"type": "thinking", "thinking": thinking, "closed": True, "signature": "x"}
    message = ChatMessage.model_validate({"role": "assistant", "content": [part, {"type": "text", "text": "a"}]})
    [shown] = template_messages([message])
    assert shown["content"][0]["thinking"] == thinking
    for role in ("user", "system", "tool"):
        with pytest.raises(ValidationError, match="only in messages of the role 'assistant'"):
            ChatMessage.model_validate({"role": role, "content": [part]})


def test_a_part_that_refuses_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    message = ChatMessage.model_validate({"role": "assistant", "content": parts})
    [shown] = template_messages([message])
    assert shown["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with pytest.raises(ValidationError, match="'refusal'"):
        ChatMessage.model_validate({"role": "assistant", "content": [{"type": "refusal", "refusal": 5, "text": "x"}]})
