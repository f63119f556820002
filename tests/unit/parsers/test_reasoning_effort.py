"""`writes_efforts`: found by rendering, whatever the template does with an effort."""

from __future__ import annotations

import pytest

from inflight.parsers.reasoning_effort import writes_efforts
from inflight.tokenizer.chat_template import ChatTemplate

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP, False),
        (LOOP + "{{ reasoning_effort }}", True),
        (LOOP + "{% if reasoning_effort == 'high' %}Think hard.{% endif %}", True),
        # an effort that a template refuses becomes the nearest one
        (LOOP + "{% if reasoning_effort == 'low' %}{{ raise_exception('no') }}{% endif %}", False),
        (LOOP + "{% if enable_thinking %}<think>{{ reasoning_effort }}{% endif %}", False),
        (LOOP + "{% set e = reasoning_effort if reasoning_effort is defined else 'medium' %}Effort: {{ e }}", True),
    ],
)
def test_a_template_that_differs_by_the_effort_writes_it(source: str, expected: bool) -> None:
    assert writes_efforts(ChatTemplate({"default": source}), None) is expected


def test_the_variables_of_the_server_count() -> None:
    template = ChatTemplate({"default": LOOP + "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}"})
    assert writes_efforts(template, {"enable_thinking": True})
    assert not writes_efforts(None, None)


def test_a_model_without_a_template_writes_none() -> None:
    assert writes_efforts(ChatTemplate({}), None) is False
