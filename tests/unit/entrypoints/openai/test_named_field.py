"""Which field an engine's message is about."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.entrypoints.openai.named_field import named_field
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.errors import ContextLengthExceededError, InvalidRequestError, TokenizerError

HELLO = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("message", "given", "expected"),
    [
        ("min_tokens=10 is more than max_tokens=3", {"min_tokens": 10}, "min_tokens"),
        ("min_tokens=10 is more than max_tokens=3", {}, None),  # the model's own default: no field of the request
        ("logit_bias holds 99999, but", {"logit_bias": {"99999": 1}}, "logit_bias"),
        ("stop strings need the text", {"stop": "x"}, "stop"),
        ("messages[0] (role 'user') has no content", {}, "messages[0]"),
        ("messages[1]['tool_calls'][0]['x'] is inf; only", {}, "messages[1].tool_calls[0].x"),
        ("tools[0] ('f'): #/properties/a/not is not supported", {"tools": TOOLS}, "tools[0]"),
        ("the prompt is empty; give", {}, "messages"),
        ("prompt token 9 at position 0 is outside", {}, "messages"),
        ("json: #/not is not supported", {"response_format": {"type": "json_object"}}, "response_format"),
        ("json: #/not is not supported", {"guided_json": {}}, "guided_json"),
        ("regex: unclosed group", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("structural_tag: structures[0]", {"tools": TOOLS}, "tools"),
        ("the answer might hold 5 log-probabilities", {"logprobs": True}, None),
        ("\N{PILE OF POO}", {}, None),
    ],
)
def test_the_field_that_a_message_begins_with(message: str, given: dict[str, Any], expected: str | None) -> None:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, **given})
    assert named_field(InvalidRequestError(message), body, "messages") == expected


def test_errors_of_one_field() -> None:
    body = ChatCompletionRequest.model_validate({"messages": HELLO})
    assert named_field(ContextLengthExceededError("x"), body, "messages") == "messages"
    assert named_field(TokenizerError("messages: x"), body, "messages") is None
    body.chat_template = "{% x"
    assert named_field(TokenizerError("x"), body, "messages") == "chat_template"
