"""Ids of calls and names of results, where a template demands them."""

from __future__ import annotations

from inflight.tokenizer.history.ids_and_names import short_id
from tests.unit.tokenizer.test_template_form import END, LOOP, WRITTEN, call, render

SHORT = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.id }}"
    "{% endfor %}"
)


def test_ids_of_other_servers() -> None:
    source = LOOP + SHORT + "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}" + END
    long = "call_0123456789abcdef01234567"
    for given in (long, "abcdefghi", "a", "toolu_01A09q90qw90lq917835lq9"):
        messages = [call(), {"role": "tool", "content": "1", "tool_call_id": given}]
        messages[0]["tool_calls"][0]["id"] = given
        assert render(source, *messages) == f"{short_id(given)}{WRITTEN}={short_id(given)}"
    assert (short_id("abcdefghi"), len(short_id(long)), short_id(long).isalnum()) == ("abcdefghi", 9, True)
    without = [call(), {"role": "tool", "content": "1"}]
    del without[0]["tool_calls"][0]["id"]
    assert render(source, *without) == f"000000000{WRITTEN}=000000000"
    free = LOOP + "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}" + END
    messages = [call()]
    messages[0]["tool_calls"][0]["id"] = long
    assert render(free, *messages) == long + WRITTEN, "a template without a demand gets what was sent"


def test_the_name_of_a_tool_result() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"}
    assert render(LOOP + "{% if m.role == 'tool' %}{{ m.name + '' }}{% endif %}" + END, call(), result) == f"{WRITTEN}f"
    assert render(LOOP + "{{ m.name or '-' }}" + END, call(), result) == f"--{WRITTEN}-", "only where it is needed"


def test_each_result_gets_the_id_and_the_name_of_its_own_call() -> None:
    """Of several calls without ids, the results come in another order and have names."""
    turn = call()
    calls = [{"function": {"name": name, "arguments": {"a": name}}} for name in ("f", "g")]
    results = [{"role": "tool", "content": name, "name": name} for name in ("g", "f")]
    source = LOOP + SHORT + "{% if m.role == 'tool' %}{{ m.content }}={{ m.tool_call_id }} {% endif %}" + END
    text = render(source, {**turn, "tool_calls": calls}, *results)
    assert text == '000000000000000001({"a": "f"})({"a": "g"})g=000000001 f=000000000 '


def test_names_where_a_template_finds_only_those_of_the_last_message() -> None:
    source = (
        LOOP + "{% if m.role == 'tool' %}{% set n = namespace(name=m.name) %}{% if loop.previtem.tool_calls and "
        "loop.previtem.tool_calls[0].id == m.tool_call_id %}{% set n.name = loop.previtem.tool_calls[0].function.name %}"
        "{% endif %}{{ n.name + '!' }}{% endif %}" + END
    )
    first, second = call(), call()
    second["tool_calls"] = [{"id": "b", "function": {"name": "g", "arguments": {}}}]
    results = [{"role": "tool", "content": "1", "tool_call_id": each} for each in ("abcdefghi", "b")]
    assert render(source, first, second, *results) == WRITTEN + "({})f!g!"
