"""The history of a chat, as clients send it: the template gets messages in a form that it can write."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.written_answer import written_answer
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.selector import create_output_parser
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.parsers.test_selector import TEMPLATES

QUESTION = {"role": "user", "content": "?"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = ChatCompletionRequest.model_validate({"messages": [QUESTION, *messages]})
    return template_messages(body.messages)


@pytest.mark.parametrize("name", [name for name, (_, found) in TEMPLATES.items() if found.tool])
def test_our_own_answers_can_be_sent_back(name: str) -> None:
    source, found = TEMPLATES[name]
    call_id = create_output_parser(found.tool, None, tools=[TOOL])._writer._make_id()
    called: list[Event] = [ToolCallStart(0, call_id, "get_it"), ToolArgumentsDelta(0, '{"a": 1}')]
    template = ChatTemplate({"default": source})
    result = {"role": "tool", "content": "21", "tool_call_id": call_id}
    for thought in ([], [ReasoningDelta("Hm.")]):
        for first in ([], [ContentDelta("Let me see.")]):
            answer: Any = written_answer([*thought, *first, *called]).as_message()
            text = template.render(messages_of(answer, result), tools=[TOOL], add_generation_prompt=False)
            assert "21" in text and "None" not in text
        said: Any = written_answer([*thought, ContentDelta("So.")]).as_message()
        assert "So." in template.render(messages_of(said, QUESTION), tools=[TOOL])


def test_parts_of_other_apis_are_text() -> None:
    parts = [{"type": kind, "text": "x"} for kind in ("text", "input_text", "output_text")]
    (_, message) = messages_of({"role": "user", "content": [*parts, {"type": "refusal", "refusal": "no"}]})
    assert [part["text"] for part in message["content"]] == ["x", "x", "x", "no"]


@pytest.mark.parametrize("role", ["function", "document", "ipython", "critic", "developer"])
def test_roles_are_passed_to_the_template(role: str) -> None:
    (_, message) = messages_of({"role": role, "content": "x", "name": "n"})
    assert message == {"role": "system" if role == "developer" else role, "content": "x", "name": "n"}
