"""Neighbours: which kinds of messages a template takes one behind the other, and what is done where it does not."""

from collections.abc import Callable
from enum import Enum, auto

from inflight.tokenizer.history.calls import result_as_question, waiting_calls
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
    (Kind.ANSWER, Kind.CALLS): (Remedy.JOIN,),
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
        """`ends`: an answer of the model follows. Otherwise the model goes on with the last message."""
        return self._arrange(conversation, self.remedy, ends=ends)

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
                return candidate if (first, second) == pair else self.remedy(first, second)

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
        found: Conversation = []
        for message in conversation:
            _append(found, message, choose)
        before = kind_of(found[-1])
        if ends and (remedy := choose(before, Kind.END)) != Remedy.NOTHING:
            for inserted in _inserted(found, remedy):
                _append(found, inserted, choose)
        return found


def _append(found: Conversation, message: dict[str, object], choose: Callable[[Kind, Kind], Remedy]) -> None:
    before = kind_of(found[-1]) if found else Kind.START
    remedy = choose(before, kind_of(message))
    if remedy == Remedy.NOTHING:
        found.append(message)
    elif remedy == Remedy.JOIN:
        found[-1] = join(found[-1], message)
    elif remedy == Remedy.INTO_RESULT:
        found[-1] = {**found[-1], "content": join_contents(found[-1].get("content"), message["content"])}  # type: ignore[arg-type]
    elif remedy == Remedy.AS_QUESTION:
        _append(found, result_as_question(message), choose)
    else:
        for inserted in _inserted(found, remedy):
            _append(found, inserted, choose)
        _append(found, message, choose)


def _inserted(found: Conversation, remedy: Remedy) -> Conversation:
    if remedy == Remedy.QUESTION_BETWEEN:
        return [{"role": "user", "content": ""}]
    if remedy == Remedy.ANSWER_BETWEEN:
        return [{"role": "assistant", "content": ""}]
    assert remedy == Remedy.RESULTS_BETWEEN
    return [
        {"role": "tool", "content": "", "name": call["function"]["name"]}
        | ({"tool_call_id": call["id"]} if "id" in call else {})
        for call in waiting_calls(found)
    ]
