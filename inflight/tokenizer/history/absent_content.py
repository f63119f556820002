"""Content that is absent: what a message without text gets as its content."""

import copy
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from inflight.tokenizer.messages import set_reasoning
from inflight.tokenizer.probes import Conversation, TemplateProbe, invented

# in the order in which they are tried; {}: the field is left out
_TEXTS: tuple[Mapping[str, Any], ...] = (
    {"content": ""},
    {"content": None},
    {},
    {"content": [{"type": "text", "text": ""}]},
    {"content": " "},
)


class AbsentContent:
    """The template takes the first form that it does not refuse, and that it does not write as an absent value."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def beside_calls(self) -> Mapping[str, Any]:
        """Null is best, as in the data that models learn from."""
        conversation, texts = invented("ucr")
        if not self._writes(conversation, texts):
            conversation, texts = invented("uc")
        candidates: tuple[Mapping[str, Any], ...] = ({"content": None}, {"content": ""}, {}, *_TEXTS[3:])
        return self._first(candidates, conversation, texts)

    @cached_property
    def of_answers(self) -> Mapping[str, Any]:
        conversation, texts = invented("uau")
        return self._first(_TEXTS, conversation, [texts[0], texts[2]])

    @cached_property
    def of_thoughts(self) -> Mapping[str, Any]:
        """For an answer with a thought only."""
        conversation, texts = invented("uau")
        set_reasoning(conversation[1], "probe thought")
        return self._first(_TEXTS, conversation, [texts[0], texts[2]])

    @cached_property
    def takes_empty_text(self) -> bool:
        """Whether a message with calls may have an empty text."""
        return any(self._writes(*invented(roles)) for roles in ("ucr", "uc"))

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, or a copy with another content if it is a message of the assistant without content."""
        if message["role"] != "assistant" or message.get("content"):
            return message
        if "tool_calls" in message:
            if message.get("content") == "" and self.takes_empty_text:
                return message
            content = self.beside_calls
        else:
            content = self.of_thoughts if message.get("reasoning_content") else self.of_answers
        rest = {key: value for key, value in message.items() if key != "content"}
        return rest | copy.deepcopy(dict(content))

    def _first(
        self, candidates: tuple[Mapping[str, Any], ...], conversation: Conversation, texts: list[str]
    ) -> Mapping[str, Any]:
        message = conversation[1]
        del message["content"]
        for candidate in candidates:
            if self._writes([conversation[0], {**message, **candidate}, *conversation[2:]], texts):
                return candidate
        return {"content": ""}

    def _writes(self, conversation: Conversation, texts: list[str]) -> bool:
        """Whether the template writes these texts, if calls have objects as arguments, or the text of objects."""
        with_text = [_with_text(message) for message in conversation]
        return any(self._probe.writes(each, texts) for each in (conversation, with_text))


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message
