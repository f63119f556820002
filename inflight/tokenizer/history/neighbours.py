"""Neighbours: which kinds of messages a template takes one behind the other, and how other histories are changed."""

from collections.abc import Callable
from enum import Enum, auto
from functools import cached_property
from typing import Any

from inflight.tokenizer.history.calls import calls_of, result_as_question
from inflight.tokenizer.history.joining import join, join_contents
from inflight.tokenizer.probes import Conversation, Message, TemplateProbe, invented


class Kind(Enum):
    START = ""
    SYSTEM = "s"
    USER = "u"
    ANSWER = "a"
    CALLS = "c"
    RESULT = "r"
    END = "."
    OTHER = "?"


class Remedy(Enum):
    NOTHING = auto()
    JOIN = auto()
    QUESTION_BETWEEN = auto()  # an empty one
    ANSWER_BETWEEN = auto()  # an empty one
    RESULTS_BETWEEN = auto()  # an empty one for each call that has none
    INTO_RESULT = auto()  # the user's text becomes a part of the result
    AS_QUESTION = auto()  # the result becomes a message of the user


Pair = tuple[Kind, Kind]

# What is tried if a template does not take a pair, in this order. All other pairs are taken by every template.
_REMEDIES: dict[Pair, tuple[Remedy, ...]] = {
    (Kind.USER, Kind.USER): (Remedy.JOIN, Remedy.ANSWER_BETWEEN),
    (Kind.ANSWER, Kind.ANSWER): (Remedy.JOIN, Remedy.QUESTION_BETWEEN),
    (Kind.ANSWER, Kind.CALLS): (Remedy.JOIN, Remedy.QUESTION_BETWEEN),
    (Kind.CALLS, Kind.CALLS): (Remedy.JOIN, Remedy.RESULTS_BETWEEN),
    (Kind.CALLS, Kind.ANSWER): (Remedy.RESULTS_BETWEEN,),
    (Kind.CALLS, Kind.USER): (Remedy.RESULTS_BETWEEN,),
    (Kind.CALLS, Kind.END): (Remedy.RESULTS_BETWEEN,),
    (Kind.RESULT, Kind.USER): (Remedy.ANSWER_BETWEEN, Remedy.INTO_RESULT),
    (Kind.SYSTEM, Kind.END): (Remedy.QUESTION_BETWEEN,),
    **{
        (before, after): (Remedy.QUESTION_BETWEEN,)
        for before in (Kind.START, Kind.SYSTEM)
        for after in (Kind.ANSWER, Kind.CALLS)
    },
    **{(before, Kind.RESULT): (Remedy.AS_QUESTION,) for before in (Kind.START, Kind.SYSTEM, Kind.USER, Kind.ANSWER)},
}
# The shortest way from the start to a message of this kind, and a usual way on from it, for the invented conversations.
_WAY_TO = {Kind.START: "", Kind.SYSTEM: "s", Kind.USER: "u", Kind.ANSWER: "ua", Kind.CALLS: "uc", Kind.RESULT: "ucr"}
_WAY_ON = {Kind.USER: "au", Kind.ANSWER: "uau", Kind.CALLS: "rau", Kind.RESULT: "au", Kind.END: ""}
_ROLES = {"system": Kind.SYSTEM, "user": Kind.USER, "tool": Kind.RESULT}


def kind_of(message: Message) -> Kind:
    if message["role"] == "assistant":
        return Kind.CALLS if message.get("tool_calls") else Kind.ANSWER
    return _ROLES.get(message["role"], Kind.OTHER)


class Neighbours:
    """`complete` brings the fields of messages into the form that the template takes; invented messages need it, too."""

    def __init__(self, probe: TemplateProbe, complete: Callable[[Conversation], Conversation]) -> None:
        self._probe = probe
        self._complete = complete
        self._remedies: dict[Pair, Remedy] = {}

    def arrange(self, conversation: Conversation, *, ends: bool) -> Conversation:
        """`ends`: True if the model writes a new answer; False if it continues the last message."""
        found = self._arrange(conversation, self.remedy, ends=ends)
        if any(kind_of(message) is Kind.USER for message in found) or self._takes_no_question:
            return found
        start = next((i for i, message in enumerate(found) if kind_of(message) is not Kind.SYSTEM), len(found))
        return [*found[:start], {"role": "user", "content": ""}, *found[start:]]

    @cached_property
    def _takes_no_question(self) -> bool:
        """Whether the template takes a conversation without any message of the user."""
        return self._probe.takes("a") or not self._probe.takes("ua")

    def remedy(self, before: Kind, after: Kind) -> Remedy:
        """What is done with a message of the kind `after` behind one of the kind `before`."""
        pair = before, after
        if pair not in _REMEDIES:
            return Remedy.NOTHING
        if pair not in self._remedies:
            self._remedies[pair] = self._find_remedy(pair)
        return self._remedies[pair]

    def _find_remedy(self, pair: Pair) -> Remedy:
        """The first remedy with which the template writes all texts. If there is none: the first that it does not refuse."""
        before, after = pair
        roles = _WAY_TO[before] + (after.value if after != Kind.END else "") + _WAY_ON[after]
        if pair == (Kind.CALLS, Kind.CALLS):
            roles = "uccrrau"
        messages, texts = invented(roles)
        candidates = (Remedy.NOTHING, *_REMEDIES[pair])
        found: dict[Remedy, Conversation] = {}
        for candidate in candidates:

            def choose(first: Kind, second: Kind, candidate: Remedy = candidate) -> Remedy:
                if (first, second) == pair:
                    return candidate
                return self.remedy(first, second)

            found[candidate] = self._complete(self._arrange(messages, choose, ends=after == Kind.END))
            is_written = self._probe.writes(found[candidate], texts, add_generation_prompt=after == Kind.END)
            if is_written and self._keeps_roles(pair, found[candidate]):
                return candidate
        return next((each for each in candidates if self._probe.writes(found[each])), Remedy.NOTHING)

    def _keeps_roles(self, pair: Pair, conversation: Conversation) -> bool:
        """Some templates write the first message as the user's, whoever has sent it."""
        first = conversation[0]
        if pair != (Kind.START, Kind.ANSWER) or first["role"] == "user":
            return True
        return not self._probe.is_same(conversation, [{**first, "role": "user"}, *conversation[1:]])

    def _arrange(
        self, conversation: Conversation, choose: Callable[[Kind, Kind], Remedy], *, ends: bool
    ) -> Conversation:
        groups: list[Conversation] = []
        for message in conversation:
            _append(groups, message, choose)
        remedy = choose(_kind_of_group(groups[-1]), Kind.END) if ends else Remedy.NOTHING
        if remedy != Remedy.NOTHING:
            for inserted in _inserted(groups, remedy):
                _append(groups, inserted, choose)
        return [_joined(group) for group in groups]


def _append(groups: list[Conversation], message: dict[str, Any], choose: Callable[[Kind, Kind], Remedy]) -> None:
    """Each group becomes one message."""
    before = _kind_of_group(groups[-1]) if groups else Kind.START
    remedy = choose(before, kind_of(message))
    if remedy == Remedy.NOTHING:
        groups.append([message])
    elif remedy in (Remedy.JOIN, Remedy.INTO_RESULT):
        groups[-1].append(message)
    elif remedy == Remedy.AS_QUESTION:
        _append(groups, result_as_question(message), choose)
    else:
        for inserted in _inserted(groups, remedy):
            _append(groups, inserted, choose)
        _append(groups, message, choose)


def _kind_of_group(group: Conversation) -> Kind:
    """Of answers and calls that are joined: calls. A result with the user's text is a result."""
    first = kind_of(group[0])
    last = kind_of(group[-1])
    return Kind.CALLS if Kind.CALLS in (first, last) else first


def _joined(group: Conversation) -> dict[str, Any]:
    if len(group) > 1 and kind_of(group[0]) == Kind.RESULT:
        return {**group[0], "content": join_contents([message.get("content") for message in group])}
    return join(group)


def _inserted(groups: list[Conversation], remedy: Remedy) -> Conversation:
    if remedy == Remedy.QUESTION_BETWEEN:
        return [{"role": "user", "content": ""}]
    if remedy == Remedy.ANSWER_BETWEEN:
        return [{"role": "assistant", "content": ""}]
    assert remedy == Remedy.RESULTS_BETWEEN
    start = len(groups)
    while start and _kind_of_group(groups[start - 1]) == Kind.CALLS:
        start -= 1
    return [
        {"role": "tool", "content": "", "name": call["function"].get("name")}
        | ({"tool_call_id": call["id"]} if "id" in call else {})
        for group in groups[start:]
        for message in group
        for call in calls_of(message)
    ]
