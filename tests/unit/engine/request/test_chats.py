"""`Chats`: the text of a conversation, and the grammar of a chat with strict tools."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inflight.engine.request.chats import Chats
from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import ChatTemplate

HERMES = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}"""
DEFAULTS = SamplingParams(temperature=0.25)


def tool(*, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": strict}}


def test_strict_tools_of_a_chat_get_a_grammar() -> None:
    chats = Chats(ChatTemplate({"default": HERMES}), DEFAULTS)
    for params in (None, SamplingParams(max_tokens=3)):
        assert Chats(None, DEFAULTS).with_strict_tools(params, [tool(strict=True)]) is params  # without a template
        assert chats.with_strict_tools(params, None) is params
        assert chats.with_strict_tools(params, []) is params
        assert chats.with_strict_tools(params, [tool(strict=False)]) is params
        constrained = chats.with_strict_tools(params, [tool(strict=True)])
        assert constrained is not None and constrained.structured_outputs is not None
        assert constrained.structured_outputs.structural_tag
        assert dataclasses.replace(constrained, structured_outputs=None) == (params or DEFAULTS)
    assert SamplingParams(temperature=0.25) == DEFAULTS


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
        Chats(None, DEFAULTS).render_text([{"role": "user", "content": "hi"}])
    chats = Chats(ChatTemplate({"default": HERMES}), DEFAULTS)
    assert chats.render_text([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "user: hi\n"
