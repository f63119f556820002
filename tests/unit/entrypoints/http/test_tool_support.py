"""A model that cannot use tools: the log says so at the start and at the first request, and each answer names the field."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.tool_support import ToolSupport
from inflight.entrypoints.openai.chat import read_chat
from inflight.parsers.selector import NONE, resolve_parsers
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.entrypoints.openai.test_chat import request, server

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHOWN = "{{ tools | tojson if tools else '' }}" + MESSAGES
WRITTEN = (
    SHOWN
    + "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n"
    + (
        '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + "}" }}\n</tool_call>'
        "{% endfor %}{% endfor %}"
    )
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("source", "parser", "num_at_start", "num_at_request"),
    [
        (SHOWN, "auto", 1, 1),  # calls are not read
        (SHOWN, NONE, 0, 0),  # as the operator wants it
        (SHOWN, "hermes", 0, 0),
        (WRITTEN, "auto", 0, 0),
        (MESSAGES, "auto", 0, 1),  # tools are not shown
        (MESSAGES, "hermes", 0, 1),
        (None, "auto", 0, 0),  # a model without chats
    ],
)
def test_what_the_log_and_the_header_say(
    source: str | None, parser: str, num_at_start: int, num_at_request: int, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate({} if source is None else {"default": source})
    with caplog.at_level(logging.WARNING):
        support = ToolSupport("m", template, resolve_parsers(parser, "none", template), is_wanted=parser != NONE)
        assert len(caplog.records) == num_at_start
        caplog.clear()
        assert {support.report() for _ in range(3)} == {("tools",) if num_at_request else ()}
        assert len(caplog.records) == num_at_request
        assert all(record.levelno == logging.WARNING and " m" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("source", "left_out"), [(MESSAGES, ("tools",)), (WRITTEN, ())])
def test_a_request_with_tools_names_the_field(source: str, left_out: tuple[str, ...]) -> None:
    template = ChatTemplate({"default": source})
    model = server(tool="hermes")
    model.tool_support = ToolSupport("m", template, resolve_parsers("auto", "none", template), is_wanted=True)

    def left_out_of(**fields: object) -> tuple[str, ...]:
        return asyncio.run(validate_chat(model, partial(read_chat, model, request(**fields)))).left_out

    assert left_out_of(tools=TOOLS) == left_out
    assert left_out_of() == ()
    assert left_out_of(tools=TOOLS, tool_choice="none") == ()
