"""Ids of calls and names of results, where a template demands them."""

import hashlib
import re
import string
from collections.abc import Sequence
from functools import cached_property

from inflight.tokenizer.history.calls import calls_of, matched
from inflight.tokenizer.probes import CALL_ID, QUESTION, Conversation, Message, TemplateProbe, a_call, a_result, a_tool

_LONG_ID = "call_0123456789abcdef01234567"
_SHORT_IDS = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARACTERS = string.ascii_letters + string.digits


class IdsAndNames:
    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def needs_short_ids(self) -> bool:
        """Whether ids of calls must be 9 letters and digits (Mistral)."""
        return not self._takes_ids(_LONG_ID) and self._takes_ids(CALL_ID)

    @cached_property
    def needs_ids(self) -> bool:
        return not self._takes_ids(None) and self._takes_ids(CALL_ID)

    @cached_property
    def needs_names(self) -> bool:
        """Whether a tool result must have the name of the tool. Some templates find it by the id themselves, but only in the
        last message with calls."""
        second = CALL_ID[::-1]
        conversations: list[list[Message]] = [
            [QUESTION, a_call(), a_result()],
            [QUESTION, a_call(), a_call(call_id=second), a_result(), a_result(call_id=second)],
            [QUESTION, {"role": "assistant", "content": "!"}, a_result()],
        ]
        return any(
            not self._takes([{key: value for key, value in message.items() if key != "name"} for message in messages])
            and self._takes(messages)
            for messages in conversations
        )

    def complete(self, conversation: Conversation) -> None:
        """Change messages, which belong to the caller, in place."""
        pairs = list(matched(conversation))
        calls = [call for message in conversation for call in calls_of(message)]
        for result, call in pairs:
            if "name" not in result and self.needs_names:
                called = call or next(reversed(calls), None)
                result["name"] = "" if called is None else str(called["function"].get("name"))
        holders = [*((call, "id") for call in calls), *((result, "tool_call_id") for result, _ in pairs)]
        if any(holder.get(key) is None for holder, key in holders) and (self.needs_ids or self.needs_short_ids):
            for number, call in enumerate(calls):
                call["id"] = call.get("id") or f"{number:09d}"
            for number, (result, call_of_result) in enumerate(pairs):
                own = f"{number:09d}" if call_of_result is None else call_of_result["id"]
                result["tool_call_id"] = result.get("tool_call_id") or own
        given = [holder[key] for holder, key in holders if isinstance(holder.get(key), str)]
        if not all(map(_SHORT_IDS.fullmatch, given)) and self.needs_short_ids:
            for holder, key in holders:
                if isinstance(value := holder.get(key), str):
                    holder[key] = short_id(value)

    def _takes_ids(self, call_id: str | None) -> bool:
        """Whether the template takes a call with this id and its result; if it takes no results, the call alone."""
        call = a_call(call_id=call_id)
        if self._takes([QUESTION, call, a_result(call_id=call_id)]):
            return True
        return not self._takes([QUESTION, a_call(), a_result()]) and self._takes([QUESTION, call])

    def _takes(self, conversation: Sequence[Message]) -> bool:
        return bool(self._probe.prompt(conversation, [a_tool()]))


def short_id(call_id: str) -> str:
    """9 letters and digits. The same for the same id, and the id itself if it has this form."""
    if _SHORT_IDS.fullmatch(call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=9).digest()
    return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest)
