"""Thoughts of the assistant: some templates read them from a field, others from parts of the content."""

from functools import cached_property
from typing import Any

from inflight.tokenizer.content_parts import THINKING, takes_thoughts
from inflight.tokenizer.messages import REASONING_FIELDS, set_reasoning
from inflight.tokenizer.probes import TemplateProbe, invented

_THOUGHT = "probe thought"


class Thoughts:
    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes parts of the type "thinking"."""
        return takes_thoughts(self._probe.render)

    @cached_property
    def takes_field(self) -> bool:
        """Whether the template writes the field in the last answer, or in a tool loop. Most leave out earlier thoughts."""
        for roles in ("ua", "ucr", "uarau", "uau"):
            conversation, _ = invented(roles)
            set_reasoning(conversation[1], _THOUGHT)
            if _THOUGHT in self._probe.prompt(conversation):
                return True
        return False

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, or a copy with its thoughts in the other form."""
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        has_parts = any(part["type"] == THINKING for part in parts)
        if has_parts and not self.takes_parts:
            thought = "".join(part[THINKING] for part in parts if part["type"] == THINKING)
            made = {**message, "content": [part for part in parts if part["type"] != THINKING]}
            if "reasoning_content" not in message:
                set_reasoning(made, thought)
            return made
        thought = message.get("reasoning_content") or ""
        if not thought or has_parts or message["role"] != "assistant" or self.takes_field or not self.takes_parts:
            return message
        rest = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
        texts = parts if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        return {**rest, "content": [{"type": THINKING, THINKING: thought}, *texts]}
