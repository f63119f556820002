"""A level of effort that a template refuses becomes the nearest that it takes."""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate

THREE = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    "{{ raise_exception('effort') }}{% endif %}{{ reasoning_effort }}"
)
NO_LEVEL = "{% if reasoning_effort is defined %}{{ raise_exception('effort') }}{% endif %}{{ messages[0].content }}"


def render(source: str, effort: object) -> str:
    template = ChatTemplate({"default": source})
    return template.render([{"role": "user", "content": "?"}], chat_template_kwargs={"reasoning_effort": effort})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("low", "low"),
        ("high", "high"),
        ("medium", "low"),
        ("none", "no_think"),
        ("minimal", "no_think"),
        ("xhigh", "high"),
        ("max", "high"),
    ],
)
def test_the_nearest_level(given: str, wanted: str) -> None:
    assert render(THREE, given) == wanted
    assert render("{{ reasoning_effort }}", given) == given


def test_a_template_without_levels_gets_none() -> None:
    assert render(NO_LEVEL, "high") == "?"


@pytest.mark.parametrize("given", ["very", 3])
def test_an_unknown_level_is_refused_by_the_template(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="effort"):
        render(THREE, given)
