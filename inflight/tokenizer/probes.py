"""Invented conversations. Chat templates are rendered with them, to find out in which form they read messages."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from inflight.errors import InvalidRequestError

Message = Mapping[str, Any]  # Any: JSON
Conversation = list[dict[str, Any]]  # Any: JSON


_MAX_ROLES = 16  # clients choose the names of roles, so the memory for them needs a bound


class PerRole:
    """A property of a template that may differ from role to role. It is found out once for each of the first roles. Later ones
    count as the user's."""

    def __init__(self, find: Callable[[str], bool]) -> None:
        self._find = find
        self._found: dict[str, bool] = {}

    def __call__(self, role: str) -> bool:
        if role not in self._found:
            role = role if len(self._found) < _MAX_ROLES else "user"
        if role not in self._found:
            self._found[role] = self._find(role)
        return self._found[role]


class Render(Protocol):
    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """Returns the prompt. Raises an `InvalidRequestError` if the template refuses the messages."""
        ...


CALL_ID = "abcdefghi"  # Mistral's templates accept only ids of this length
NAME = "probe"
ARGUMENT = "text"
QUESTION: Message = {"role": "user", "content": "?"}
# How templates write a value that is absent: as Python's None, as JSON's null, or as Jinja's undefined.
_ABSENT = re.compile(r"(?<!\w)(?:None|null|undefined|Undefined)(?!\w)")


def a_tool(*arguments: str) -> Message:
    """A function with these integers as arguments."""
    properties = {name: {"type": "integer", "description": ""} for name in arguments}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}


def a_call(arguments: Mapping[str, Any] | str | None = None, call_id: str | None = CALL_ID) -> dict[str, Any]:
    """A message of the assistant with a call. `arguments` None: there are none. `call_id` None: the call has no id."""
    id_field = {} if call_id is None else {"id": call_id}
    made = {
        "type": "function",
        **id_field,
        "function": {"name": NAME, "arguments": {} if arguments is None else arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def a_result(content: object = "1", call_id: str | None = CALL_ID) -> dict[str, Any]:
    """The message with the result of a call."""
    id_field = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", "content": content, "name": NAME, **id_field}


def first_rendered(render: Render, conversations: Iterable[Sequence[Message]], tools: Sequence[Message]) -> str:
    """Returns the prompt of the first conversation that the template does not refuse; "" if it refuses all."""
    for conversation in conversations:
        try:
            return render(conversation, tools)
        except InvalidRequestError:
            continue
    return ""


def invented(roles: str) -> tuple[Conversation, list[str]]:
    """A conversation, and its texts in their order. Each letter is a message: "s" of the system, "u" of the user, "a" an
    answer, "c" an answer with a call and no text, "r" the result of the first call that has none. The text of "c" is the
    call's argument."""
    conversation: Conversation = []
    texts: list[str] = []
    waiting = [CALL_ID]
    for number, letter in enumerate(roles):
        text = f"probe text {chr(ord('a') + number)}"
        if letter == "c":
            waiting.append(f"{CALL_ID[:-1]}{number}")
            conversation.append(a_call({ARGUMENT: text}, waiting[-1]))
        elif letter == "r":
            result = a_result(text, waiting.pop(1) if len(waiting) > 1 else CALL_ID)
            if not any("tool_calls" in message for message in conversation):
                del result["name"]  # no call says what it is
            conversation.append(result)
        else:
            role = {"s": "system", "u": "user", "a": "assistant"}[letter]
            conversation.append({"role": role, "content": text})
        texts.append(text)
    return conversation, texts


def in_order(prompt: str, texts: Iterable[str]) -> bool:
    """Whether the prompt has the texts one behind the other."""
    at = 0
    for text in texts:
        found = prompt.find(text, at)
        if found < 0:
            return False
        at = found + len(text)
    return True


def count_absent(prompt: str) -> int:
    """How often a prompt says that a value is absent."""
    return len(_ABSENT.findall(prompt))


class TemplateProbe:
    """Says what one template writes. A question, an answer and a question are rendered without tools and with one. Where the
    template takes these, other conversations are tried, too."""

    def __init__(
        self, render: Render, complete: Callable[[Sequence[Message]], Sequence[Message]] = lambda messages: messages
    ) -> None:
        """`complete`: changes each conversation before it is rendered."""
        self.render = render
        self._complete = complete

    def prompt(
        self, conversation: Sequence[Message], tools: Sequence[Message] = (), *, add_generation_prompt: bool = False
    ) -> str:
        """Returns "" if the template refuses the messages."""
        with suppress(InvalidRequestError):
            return self.render(self._complete(conversation), tools, add_generation_prompt=add_generation_prompt)
        return ""

    def writes(
        self, conversation: Sequence[Message], texts: Sequence[str] = (), *, add_generation_prompt: bool = False
    ) -> bool:
        """Whether the template takes the conversation, writes these texts in their order, and writes no absent value."""
        if not self._usual:
            return False
        for tools, num_absent in self._usual:
            prompt = self.prompt(conversation, tools, add_generation_prompt=add_generation_prompt)
            if not prompt or not in_order(prompt, texts):
                return False
            if count_absent(prompt) > max(num_absent, count_absent(self.prompt(_filled(conversation), tools))):
                return False
        return True

    def is_same(self, first: Sequence[Message], second: Sequence[Message]) -> bool:
        """Whether the template writes the same prompt for both, without tools or with one."""
        pairs = [(self.prompt(first, tools), self.prompt(second, tools)) for tools, _ in self._usual]
        return any(one == two and one for one, two in pairs)

    def takes(self, roles: str) -> bool:
        """Whether the template writes the texts of the conversation `invented(roles)` in their order."""
        return self.writes(*invented(roles))

    @cached_property
    def _usual(self) -> list[tuple[Sequence[Message], int]]:
        """The lists of tools that are tried, with the number of absent values that the template always writes."""
        conversation, _ = invented("uau")
        lists: tuple[Sequence[Message], ...] = ((), (a_tool(ARGUMENT),))
        prompts = [(tools, self.prompt(conversation, tools)) for tools in lists]
        return [(tools, count_absent(prompt)) for tools, prompt in prompts if prompt]


def _filled(conversation: Sequence[Message]) -> list[Message]:
    """The conversation with a text in each message. A template may write `null` for another reason than absent content."""
    return [message if message.get("content") else {**message, "content": "-"} for message in conversation]
