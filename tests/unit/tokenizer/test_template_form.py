"""What clients send is brought into the form that each template can write."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.parsers.test_selector import TEMPLATES

LOOP = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}"
END = CALLS + "{% endfor %}"
WRITTEN = '({"a": 1})'  # the call
QUESTION = {"role": "user", "content": "?"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def call(**fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"a": 1}}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        **fields,
    }


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate({"default": source}).render([QUESTION, *messages], add_generation_prompt=False, **more)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("[{{ m.content }}]", "[?][]CALL"),  # null would be written as "None"
        ("[{{ m.content | trim }}]", "[?][]CALL"),
        ("[{{ m['content'] + '' }}]", "[?][]CALL"),  # neither null nor nothing can be added to a text
        ("[{{ 'none' if m.content is none else m.content }}]", "[?][none]CALL"),
        ("[{{ raise_exception('text') if m.content is string and m.tool_calls else m.content or '' }}]", "[?][]CALL"),
        ("[{{ raise_exception('no') if m.content is defined and m.tool_calls else m.content }}]", "[?][]CALL"),
    ],
)
@pytest.mark.parametrize("fields", [{"content": None}, {}])
def test_a_call_without_content(source: str, wanted: str, fields: dict[str, Any]) -> None:
    assert render(LOOP + source + END, call(**fields)) == wanted.replace("CALL", WRITTEN)


@pytest.mark.parametrize("calls", [None, []])
def test_an_empty_list_of_calls_is_no_list(calls: Any) -> None:
    source = LOOP + "{% if m.tool_calls is defined %}{{ m.tool_calls[0].id }}{% else %}{{ m.content }}{% endif %}" + END
    assert render(source, {"role": "assistant", "content": "!", "tool_calls": calls}) == "?!"


def test_empty_lists_of_tools_and_documents_are_none() -> None:
    template = ChatTemplate({"default": "{{ tools }}{{ documents }}", "tool_use": "never"})
    assert template.render([QUESTION], tools=[], documents=[]) == "NoneNone"


def test_an_answer_without_anything_and_a_result_without_content() -> None:
    source = LOOP + "[{{ m.content + '' }}]" + END
    assert render(source, {"role": "assistant", "content": None, "reasoning_content": "Hm"}) == "[?][]"
    assert render(source, call(), {"role": "tool", "content": None, "tool_call_id": "abcdefghi"}) == f"[?][]{WRITTEN}[]"


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
USER_LOOPS = (
    "{% if m.role == 'user' and m.content is not string %}{% for part in m.content %}{{ part.text }}SEP{% endfor %}"
    "{% else %}[{{ WRITTEN }}]{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (USER_LOOPS.replace("SEP", "").replace("WRITTEN", "m.content"), "onetwo[]CALL[one\ntwo]"),
        (USER_LOOPS.replace("SEP", "\n").replace("WRITTEN", "m.content"), "one\ntwo\n[]CALL[one\ntwo]"),
        (USER_LOOPS.replace("SEP", "").replace("WRITTEN", "m.content | tojson"), 'onetwo[""]CALL["one\\ntwo"]'),
        (USER_LOOPS.replace("SEP", "").replace("WRITTEN", "m.content + ''"), "onetwo[]CALL[one\ntwo]"),
        ("{% for part in m.content %}<{{ part.text or part }}>{% endfor %}", "<one><two>CALL<one><two>"),
        ("[{{ m.content }}]", "[one\ntwo][]CALL[one\ntwo]"),
    ],
)
def test_parts_are_a_string_where_the_template_does_not_write_parts(source: str, wanted: str) -> None:
    template = ChatTemplate({"default": LOOP + source + END})
    messages = [
        {"role": "user", "content": PARTS},
        call(content=""),
        {"role": "tool", "content": PARTS, "tool_call_id": "x"},
    ]
    assert template.render(messages, add_generation_prompt=False) == wanted.replace("CALL", WRITTEN)


def test_a_template_that_refuses_everything_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="never"):
        render(
            "{{ raise_exception('never') }}",
            call(content=None),
            {"role": "tool", "content": PARTS, "tool_call_id": "x"},
        )


CONTENTS: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
ARGUMENTS: list[Any] = [{"a": 1}, json.dumps({"a": 1}), None]
IDS = ["abcdefghi", "call_0123456789abcdef01234567"]
RESULTS: list[Any] = ["21", [{"type": "text", "text": "21"}], "", None]


@pytest.mark.parametrize("name", [name for name, (_, found) in TEMPLATES.items() if found.tool])
def test_every_clients_second_turn_renders(name: str) -> None:
    """Whatever a client makes of an answer with a call, the template writes it, and no Python text."""
    template = ChatTemplate({"default": TEMPLATES[name][0]})
    for content, arguments, call_id, result in itertools.product(CONTENTS, ARGUMENTS, IDS, RESULTS):
        function = {
            "name": "get_it",
            "arguments": arguments if isinstance(arguments, dict | None) else json.loads(arguments),
        }
        turn = {
            "role": "assistant",
            **content,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
        answer = {"role": "tool", "content": result, "tool_call_id": call_id}
        for messages in (
            [QUESTION, turn, answer],
            [QUESTION, turn, answer, {"role": "assistant", "content": "So.", "tool_calls": []}],
        ):
            tools = None if name == "smollm3" else [TOOL]  # this template writes them as Python text
            text = template.render(messages, tools=tools, add_generation_prompt=False)
            assert "get_it" in text, (content, arguments, text)
            assert not {"None", "'type'", "'text'", "&#34;", "Undefined"} & set(
                text.replace("{", " ").replace(":", " ").split()
            )
            assert not result or "21" in text


# -- system messages that are not the first message ---------------------------------------------------------------------

WRITES_ALL = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }} {% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role[0] }}:{{ m.content }} {% endif %}"
    "{% endfor %}"
)
MOVES = (
    "{% for m in messages if m.role == 'system' %}s:{{ m.content }} {% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
)
ALTERNATES = (
    "{% set n = namespace(last='') %}{% for m in messages %}{% if m.role == n.last %}{{ raise_exception('twice') }}"
    "{% endif %}{% set n.last = m.role %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
)


def conversation(roles: str) -> list[dict[str, Any]]:
    """Messages with the numbers of their places. "s" is a message of the system, "u" of the user, "a" of the assistant."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]


def render_roles(source: str, roles: str) -> str:
    text = ChatTemplate({"default": source}).render(conversation(roles), add_generation_prompt=False)
    return text.replace("\n\n", "+").strip()


@pytest.mark.parametrize("roles", ["u", "su", "sus", "usau", "ssu", "susausa"])
def test_a_template_that_writes_them_gets_them(roles: str) -> None:
    assert render_roles(WRITES_ALL, roles) == " ".join(f"{role}:{i}" for i, role in enumerate(roles))


@pytest.mark.parametrize("source", [REFUSES, DROPS, MOVES])
@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("su", "s:0 u:1"),
        ("ssu", "s:0+1 u:2"),
        ("susau", "s:0 u:1+2 a:3 u:4"),
        ("susuau", "s:0 u:1+2+3 a:4 u:5"),
        ("us", "u:0+1"),
        ("suatsa", "s:0 u:1 a:2 t:3 u:4 a:5"),
        ("suasu", "s:0 u:1 a:2 u:3+4"),
        ("suuasu", "s:0 u:1 u:2 a:3 u:4+5"),  # two messages that the client has sent stay two
    ],
)
def test_elsewhere_they_are_the_users_at_their_place(source: str, roles: str, wanted: str) -> None:
    assert render_roles(source, roles) == wanted


def test_a_template_that_wants_turns_gets_them() -> None:
    assert render_roles(ALTERNATES, "susau") == "s:0 u:1 s:2 a:3 u:4"
    refused = ALTERNATES.replace("m.role == n.last", "m.role == n.last or (m.role == 'system' and not loop.first)")
    assert render_roles(refused, "susau") == "s:0 u:1+2 a:3 u:4"


def test_parts_are_joined_too() -> None:
    messages = conversation("sus")
    messages[1]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = ChatTemplate({"default": REFUSES}).render(messages, add_generation_prompt=False)
    assert text == "s:0 u:a\nb\n\n2 "
    assert [message["role"] for message in messages] == ["system", "user", "system"], "the caller's messages stay"


def test_the_type_of_a_call() -> None:
    source = LOOP + "{% for c in m.tool_calls or [] %}{{ c.type + '' }}{% endfor %}" + END
    for kind in ({}, {"type": None}, {"type": "function"}):
        message = call()
        [made] = message["tool_calls"]
        made.pop("type", None)
        made |= kind
        assert render(source, message) == f"function{WRITTEN}"
