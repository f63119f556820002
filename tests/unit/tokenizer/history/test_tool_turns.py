"""Turns with calls: the order of results, parallel calls, and text beside calls."""

from __future__ import annotations

import pytest

from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.tokenizer.history.small_templates import (
    ALTERNATES,
    END,
    FIRST_CALL,
    LOOP,
    ONE_CALL,
    TAKES_ALL,
    call,
    calling,
    conversation,
    render,
    result,
    user,
)

X, Y = call("x", "one"), call("y", "two")
SHOWS_IDS = TAKES_ALL.replace("{{ m.role[0] }}:", "{{ m.role[0] }}{{ m.tool_call_id }}:")


@pytest.mark.parametrize(
    ("messages", "taken", "single"),
    [
        ([calling(X, Y), result("1", "one"), result("2", "two")], "a:(x)(y) t:1 t:2", "a:(x) t:1 a:(y) t:2"),
        ([calling(X, Y), result("2", "two"), result("1", "one")], "a:(x)(y) t:1 t:2", "a:(x) t:1 a:(y) t:2"),
        (
            [calling(X), calling(Y), result("1", "one"), result("2", "two")],
            "a:(x) a:(y) t:1 t:2",
            "a:(x) t:1 a:(y) t:2",
        ),
        ([calling(X, Y), result("2", "two"), user()], "a:(x)(y) t:2 u:?", "a:(x) a:(y) t:2 u:?"),
        ([calling(X, Y)], "a:(x)(y)", "a:(x) a:(y)"),
        ([calling(call("x"), call("y")), result("1"), result("2")], "a:(x)(y) t:1 t:2", "a:(x) t:1 a:(y) t:2"),
        (
            [calling(X, Y, content="!"), result("1", "one"), result("2", "two"), calling(X), result("3", "one")],
            "a:!(x)(y) t:1 t:2 a:(x) t:3",
            "a:!(x) t:1 a:(y) t:2 a:(x) t:3",
        ),
        ([calling(X, Y), result("1", "one"), result("0", "none")], "a:(x)(y) t:1 t:0", "a:(x) t:1 a:(y) t:0"),
    ],
)
def test_parallel_calls(messages: list[dict[str, object]], taken: str, single: str) -> None:
    given = [user(), *messages]
    assert render(TAKES_ALL, given) == f"u:? {taken}"
    for source in (ONE_CALL, FIRST_CALL):
        assert render(source, given) == f"u:? {single}"


def test_the_missing_result_of_a_split_call_is_empty_where_the_template_needs_one() -> None:
    needs = "{% if m.tool_calls and (loop.last or loop.nextitem.role != 'tool') %}{{ raise_exception('result') }}{% endif %}"
    source = LOOP + needs + "{% endfor %}" + ONE_CALL
    assert render(source, [user(), calling(X, Y), result("2", "two")]) == "u:? a:(x) t: a:(y) t:2"


def test_results_keep_their_order_where_the_prompt_has_ids() -> None:
    messages = [user(), calling(X, Y), result("2", "two"), result("1", "one")]
    assert render(SHOWS_IDS, messages) == "u:? a:(x)(y) ttwo:2 tone:1"
    assert render(TAKES_ALL, messages) == "u:? a:(x)(y) t:1 t:2"


def test_results_without_ids_belong_to_the_calls_of_their_names() -> None:
    f, g = call("x"), call("y")
    g["function"]["name"] = "g"
    messages = [user(), calling(f, g), result("of g", name="g"), result("of f", name="f")]
    assert render(TAKES_ALL, messages) == "u:? a:(x)(y) t:of f t:of g"
    assert render(ONE_CALL, messages) == "u:? a:(x) t:of f a:(y) t:of g"


def test_a_message_between_call_and_result() -> None:
    messages = [user(), calling(X), user("!"), result("1", "one")]
    assert render(TAKES_ALL, messages) == "u:? a:(x) u:! t:1"
    needs = LOOP + "{% if m.role == 'tool' and not (loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
    needs += "{{ raise_exception('call') }}{% endif %}{% endfor %}"
    assert render(needs + TAKES_ALL, messages) == "u:? a:(x) t:1 u:!"
    both = [user(), calling(X, Y), result("1", "one"), user("!"), result("2", "two")]
    assert render(needs + TAKES_ALL, both) == "u:? a:(x)(y) t:1 t:2 u:!"


LOSES_TEXT = TAKES_ALL.replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content }}")
LOSES_CALL = TAKES_ALL.replace("m.tool_calls or []", "(m.tool_calls if m.tool_calls and not m.content else [])")
WITH_THOUGHT = TAKES_ALL.replace("{{ m.content", "{{ '<' ~ m.thinking ~ '>' if m.thinking }}{{ m.content")
# as gpt-oss: a text beside a call is a thought
ONE_OF_BOTH = (
    LOOP
    + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    + END
    + WITH_THOUGHT
)


@pytest.mark.parametrize("source", [LOSES_TEXT, LOSES_CALL])
def test_a_text_that_is_lost_beside_calls_is_an_answer(source: str) -> None:
    messages = [user(), calling(X, content="!"), result("1", "one")]
    assert render(source, messages) == "u:? a:! a:(x) t:1"
    assert render(source, [user(), calling(X), result("1", "one")]) == "u:? a:(x) t:1"


def test_a_text_beside_calls_stays_where_turns_alternate() -> None:
    source = ALTERNATES.replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content }}")
    assert render(source, [user(), calling(X, content="!"), result("1", "one")]) == "u:? a:(x) t:1"


def test_a_thought_and_a_text_beside_calls() -> None:
    messages = [user(), calling(X, content="!", reasoning_content="Hm."), result("1", "one")]
    assert render(WITH_THOUGHT, messages) == "u:? a:<Hm.>!(x) t:1"
    assert render(ONE_OF_BOTH, messages) == "u:? a:Hm.+!(x) t:1"
    assert (
        render(ONE_OF_BOTH, [user(), calling(X, reasoning_content="Hm."), result("1", "one")]) == "u:? a:<Hm.>(x) t:1"
    )


def test_the_prompt_of_a_history_does_not_change() -> None:
    messages = [user(), calling(X, Y), result("1", "one"), result("2", "two"), *conversation("au")]
    for source in (ONE_CALL, LOSES_TEXT, TAKES_ALL):
        template = ChatTemplate({"default": source})
        whole = template.render(messages, add_generation_prompt=False)
        for end in (1, 4, 5):
            assert whole.startswith(template.render(messages[:end], add_generation_prompt=False))
