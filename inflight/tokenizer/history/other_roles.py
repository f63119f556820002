"""Roles that OpenAI's API does not have, such as `document` or `critic`: some templates refuse them, or leave their messages
out."""

from functools import cached_property
from typing import Any

from inflight.tokenizer.history.joining import with_text_before
from inflight.tokenizer.probes import Conversation, Message, TemplateProbe, invented

_KNOWN = frozenset({"system", "user", "assistant", "tool"})
_MAX_TRIED = 16  # roles; clients choose their names, so the memory of this object needs a bound
_PLACES = ("suau", "uasu", "usau", "uas")  # "s" stands for the message with the other role


class OtherRoles:
    """A message whose role the template does not write becomes the user's, with the name of the role before its text."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe
        self._tried: dict[str, bool] = {}

    def arrange(self, conversation: Conversation) -> Conversation:
        if _KNOWN.issuperset(message["role"] for message in conversation):
            return conversation
        return [message if self._stays(message["role"]) else _as_question(message) for message in conversation]

    def _stays(self, role: str) -> bool:
        return role in _KNOWN or self._takes_any or self._takes(role)

    @cached_property
    def _takes_any(self) -> bool:
        return self._writes("probe_role")

    def _takes(self, role: str) -> bool:
        if role not in self._tried:
            if len(self._tried) == _MAX_TRIED:
                return False
            self._tried[role] = self._writes(role)
        return self._tried[role]

    def _writes(self, role: str) -> bool:
        for place in _PLACES:
            conversation, texts = invented(place)
            found = [{**each, "role": role} if each["role"] == "system" else each for each in conversation]
            if self._probe.writes(found, texts):
                return True
        return False


def _as_question(message: Message) -> dict[str, Any]:
    return {"role": "user", "content": with_text_before(f"{message['role']}: ", message)}
