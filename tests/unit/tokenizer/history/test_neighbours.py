"""Messages that a template does not take one behind the other are joined, or get an empty message between them."""

from __future__ import annotations

import pytest

from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.tokenizer.history.small_templates import (
    ALTERNATES,
    CALLS_NEED_RESULTS,
    LOOP,
    TAKES_ALL,
    TWO_ROLES,
    call,
    calling,
    conversation,
    render,
    result,
    user,
)

FORMS = [
    "u",
    "su",
    "uu",
    "uau",
    "uaau",
    "au",
    "sau",
    "ua",
    "s",
    "uct",
    "uctau",
    "uctu",
    "ucu",
    "uc",
    "uact",
    "ut",
    "tu",
    "ct",
]


@pytest.mark.parametrize("roles", FORMS)
def test_a_template_that_takes_them_gets_them(roles: str) -> None:
    words = [f"a:({i})" if role == "c" else f"{role}:{i}" for i, role in enumerate(roles)]
    assert render(TAKES_ALL, roles) == " ".join(words)


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("uu", "u:0+1"),
        ("suuu", "s:0 u:1+2+3"),
        ("uauu", "u:0 a:1 u:2+3"),
        ("uaau", "u:0 a:1+2 u:3"),
        ("au", "u: a:0 u:1"),
        ("sau", "s:0 u: a:1 u:2"),
        ("ct", "u: a:(0) t:1"),
        ("uctu", "u:0 a:(1) t:2 a: u:3"),
        ("uctuu", "u:0 a:(1) t:2 a: u:3+4"),
        ("uctctu", "u:0 a:(1) t:2 a:(3) t:4 a: u:5"),
        ("uactau", "u:0 a:1(2) t:3 a:4 u:5"),
        ("ucu", "u:0 a:(1) t: a: u:2"),
        ("ssuuctu", "s:0 s:1 u:2+3 a:(4) t:5 a: u:6"),
        ("uaa", "u:0 a:1+2"),
    ],
)
def test_a_template_that_wants_turns_gets_them(roles: str, wanted: str) -> None:
    assert render(ALTERNATES, roles) == wanted


def test_without_roles_for_tools_nothing_is_lost() -> None:
    assert render(TWO_ROLES, "ssuuctu") == ('u:0+1+2+3 a:Tool call: f({"a": "4"}) u:Tool result (f): 5+6')


@pytest.mark.parametrize(
    ("roles", "wanted"), [("uc", "u:0 a:(1) t:"), ("ucu", "u:0 a:(1) t: u:2"), ("uct", "u:0 a:(1) t:2")]
)
def test_a_call_without_a_result_gets_an_empty_one_where_the_template_needs_it(roles: str, wanted: str) -> None:
    assert render(CALLS_NEED_RESULTS, roles) == wanted


def test_each_call_without_a_result_gets_one() -> None:
    messages = [user(), calling(call("x", "one"), call("y", "two")), result("2", "two"), user("!")]
    source = ALTERNATES.replace("{{ m.role[0] }}:", "{{ m.role[0] }}{{ m.tool_call_id }}:")
    assert render(source, messages) == "u:? a:(x)(y) ttwo:2 a: u:!"
    assert render(source, [*messages[:2], user("!")]) == "u:? a:(x)(y) tone: ttwo: a: u:!"


def test_parts_are_joined_as_one_text() -> None:
    messages = conversation("uu")
    messages[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(ALTERNATES, messages) == "u:a\nb+1"
    assert [message["role"] for message in messages] == ["user", "user"], "the caller's messages stay"


def test_where_no_answer_may_be_empty_the_text_is_a_part_of_the_result() -> None:
    source = (
        ALTERNATES + LOOP + "{% if m.role == 'assistant' and not m.tool_calls and not m.content or m.content == ' ' %}"
    )
    source += "{{ raise_exception('empty') }}{% endif %}{% if m.content is not string and not m.tool_calls %}"
    source += "{{ raise_exception('text') }}{% endif %}{% endfor %}"
    assert render(source, "uctu") == "u:0 a:(1) t:2+3"


def test_a_first_message_that_is_always_the_users_is_one() -> None:
    source = "u:{{ messages[0].content }} {% for m in messages[1:] %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
    assert render(source, "au") == "u: a:0 u:1"


def test_an_orphaned_result_is_the_users() -> None:
    refuses = (
        LOOP
        + "{% if m.role == 'tool' and (loop.first or not (loop.previtem.tool_calls or loop.previtem.role == 'tool')) %}"
    )
    refuses += "{{ raise_exception('no call') }}{% endif %}{% endfor %}" + TAKES_ALL
    assert render(refuses, "tau") == "u:Tool result: 0 a:1 u:2"
    assert render(refuses, "uctut") == "u:0 a:(1) t:2 t:4 u:3", "a second result of the call"


@pytest.mark.parametrize("source", [TAKES_ALL, ALTERNATES, TWO_ROLES, CALLS_NEED_RESULTS])
@pytest.mark.parametrize("roles", ["uauau", "suctau", "uuauu", "suctctau", "uctuau"])
def test_the_prompt_of_a_history_does_not_change(source: str, roles: str) -> None:
    template = ChatTemplate({"default": source})
    whole = template.render(conversation(roles), add_generation_prompt=False)
    for end in range(1, len(roles)):
        if (roles[end - 1] in "us" and roles[end] != roles[end - 1]) or roles[end] == "a":
            begin = template.render(conversation(roles[:end]), add_generation_prompt=False)
            assert whole.startswith(begin.rstrip()), roles[:end]


def test_going_on_with_the_last_message() -> None:
    template = ChatTemplate({"default": ALTERNATES})
    for roles, wanted in (("uaa", "u:0 a:1\n\n2"), ("uctua", "u:0 a:(1) t:2 a: u:3 a:4"), ("a", "u: a:0")):
        text = template.render(conversation(roles), add_generation_prompt=False, continue_final_message=True)
        assert text == wanted


def test_a_long_history_is_joined_at_once() -> None:
    """Joined one by one, the texts would be copied 5,000 times: 50 GB."""
    messages = [user("x" * 4_000) for _ in range(5_000)]
    text = ChatTemplate({"default": ALTERNATES}).render(messages, add_generation_prompt=False)
    assert len(text) == 2 + 5_000 * 4_000 + 4_999 * 2 + 1


def test_a_template_that_needs_a_question_gets_an_empty_one() -> None:
    source = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no query') }}{% endif %}"
    for roles, wanted in {"a": "u: a:0", "sa": "s:0 u: a:1", "ct": "u: a:(0) t:1", "au": "a:0 u:1"}.items():
        assert render(source + TAKES_ALL, roles) == wanted
        assert render(TAKES_ALL, roles) == wanted.replace("u: ", "")


def test_an_answer_before_calls_is_not_lost() -> None:
    """Where the text of a message with calls is not written."""
    source = ALTERNATES.replace("{{ m.content or '' }}", "{{ m.content if m.content and not m.tool_calls else '' }}")
    assert render(source, "uactau") == "u:0 a:1 u: a:(2) t:3 a:4 u:5"
