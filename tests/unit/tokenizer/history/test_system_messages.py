"""System messages that a template refuses, loses or moves become a part of the user's turn at their place."""

from __future__ import annotations

import pytest

from tests.unit.tokenizer.history.small_templates import LOOP, TAKES_ALL, TWO_ROLES, conversation, render

REFUSES = LOOP + "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + TAKES_ALL
LOSES = TAKES_ALL.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}", 1)
# as Mistral's templates from v3 on: it is lost if the last message is a result
IN_LAST_QUESTION = TAKES_ALL.replace(
    "{% for m in messages %}",
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}",
    1,
)
ONE_FIRST = (
    LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{% endfor %}"
    + TAKES_ALL
)


@pytest.mark.parametrize("source", [REFUSES, LOSES, IN_LAST_QUESTION])
@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("su", "u:0+1"),
        ("ssu", "u:0+1+2"),
        ("s", "u:0"),
        ("sau", "u:0 a:1 u:2"),
        ("suctau", "u:0+1 a:(2) t:3 a:4 u:5"),
        ("suctsu", "u:0+1 a:(2) t:3 u:4+5"),
        ("suau", "u:0+1 a:2 u:3"),
    ],
)
def test_a_first_system_message(source: str, roles: str, wanted: str) -> None:
    assert render(source, roles) == wanted


def test_with_turns_of_two_roles_only() -> None:
    assert render(TWO_ROLES, "susau") == "u:0+1+2 a:3 u:4"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_developer_is_another_name(role: str) -> None:
    messages = conversation("uu")
    messages[0]["role"] = role
    assert render(ONE_FIRST, messages) == "s:0 u:1"
    messages[1]["role"] = role
    assert render(ONE_FIRST, messages) == "s:0+1"


def test_thoughts_of_a_joined_message_are_joined() -> None:
    messages = conversation("uaau")
    for message in messages[1:3]:
        message["reasoning_content"] = f"because {message['content']}"
    source = (
        LOOP + "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('twice') }}{% endif %}"
        "{{ m.role[0] }}:{{ '<' ~ m.reasoning_content ~ '>' if m.reasoning_content }}{{ m.content }} {% endfor %}"
    )
    assert render(source, messages) == "u:0 a:<because 1+because 2>1+2 u:3"
