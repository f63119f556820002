"""System messages, the first one and later ones: some templates refuse them, leave them out or move them."""

from functools import cached_property

from inflight.tokenizer.history.joining import join
from inflight.tokenizer.probes import Conversation, TemplateProbe


class SystemMessages:
    """What a template does not write at its place becomes a part of the user's turn there, so the prompt before it does not
    change."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def takes_first(self) -> bool:
        """Whether the template writes a system message before the first question, also while tools are called. Some write it
        into the last question; then it is lost when a tool's result comes last."""
        return self._probe.takes("suau") and (self._probe.takes("sucr") or not self._probe.takes("ucr"))

    @cached_property
    def takes_several(self) -> bool:
        return self.takes_late and self._probe.takes("ssuau")

    @cached_property
    def takes_late(self) -> bool:
        """Whether the template writes system messages at their places behind a question, an answer and a result."""
        first = "s" if self.takes_first else ""
        places = ["usau", "uasu", *(["ucrsau"] if self._probe.takes("ucrau") else [])]
        return all(self._probe.takes(first + place) for place in places)

    def arrange(self, conversation: Conversation) -> Conversation:
        """A system message that the template does not take becomes one message with the user's messages beside it, because some
        templates refuse two in a row. Two that the client has sent stay two."""
        if not any(message["role"] == "system" for message in conversation):
            return conversation
        found: list[Conversation] = []  # each group becomes one message
        is_behind_system = False  # the last message was the system's, and is now the user's
        is_late = False
        for message in conversation:
            is_late = is_late or message["role"] != "system"
            becomes_user = message["role"] == "system" and not self._stays(is_late=is_late)
            role = "user" if becomes_user else message["role"]
            joins = becomes_user or (is_behind_system and role == "user")
            if found and found[-1][0]["role"] == role and (joins or (role == "system" and not self.takes_several)):
                found[-1].append(message)
            else:
                found.append([{**message, "role": role}])
            is_behind_system = becomes_user
        return [join(group) for group in found]

    def _stays(self, *, is_late: bool) -> bool:
        return self.takes_late if is_late else self.takes_first
