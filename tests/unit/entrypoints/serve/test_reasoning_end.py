"""The end of a model's thinking, as the server finds it when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.engine_start import with_reasoning_end
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError

OPENS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a><think>\n{% endif %}"


@pytest.fixture
def thinks(tmp_path: Path) -> str:
    path = tmp_path / "thinks.jinja"
    path.write_text(OPENS)
    return str(path)


def test_a_template_that_opens_a_thought(thinks: str) -> None:
    args = EngineArgs(chat_template=thinks)
    assert with_reasoning_end(args, ServerSettings()).reasoning_end == "</think>"
    assert with_reasoning_end(args, ServerSettings(reasoning_parser="mistral")).reasoning_end == "[/THINK]"
    assert with_reasoning_end(args, ServerSettings(reasoning_parser="none")) == args
    assert with_reasoning_end(EngineArgs(), ServerSettings()).reasoning_end == "", "the embedded model does not think"


def test_what_the_user_says_is_left(thinks: str) -> None:
    args = EngineArgs(chat_template=thinks, reasoning_end="</mine>")
    assert with_reasoning_end(args, ServerSettings()) is args
    with pytest.raises(ConfigError, match="reasoning_parser='mine'"):
        with_reasoning_end(EngineArgs(), ServerSettings(reasoning_parser="mine"))
