"""Turns with calls: the order of results, parallel calls, and text beside calls."""

import itertools
from functools import cached_property
from typing import Any

from inflight.tokenizer.history.calls import calls_of, matched
from inflight.tokenizer.history.joining import join_contents
from inflight.tokenizer.history.neighbours import Kind, Neighbours, Remedy, kind_of
from inflight.tokenizer.messages import REASONING_FIELDS, set_reasoning
from inflight.tokenizer.probes import ARGUMENT, Conversation, Message, TemplateProbe, a_call, a_result, invented

_TEXT, _THOUGHT, _ARGUMENT = "probe text beside", "probe thought", "probe argument"
_SECOND, _RESULT = "probe argument of the second", "probe result"


class ResultOrder:
    """Results stand right behind their calls, where a template takes nothing between. They have the order of the calls, where
    only the order tells to which call a result belongs."""

    def __init__(self, probe: TemplateProbe, neighbours: Neighbours) -> None:
        self._probe = probe
        self._neighbours = neighbours

    @cached_property
    def shows_ids(self) -> bool:
        """Whether the prompt says by ids to which call a result belongs."""
        first = invented("uc")[0][1]
        second = _second_call()
        calls = {**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}
        ids = [call["id"] for call in calls["tool_calls"]]
        prompts = [
            self._probe.prompt([*invented("u")[0], calls, a_result("1", one), a_result("2", two)])
            for one, two in (ids, reversed(ids))
        ]
        return prompts[0] != prompts[1]

    def arrange(self, conversation: Conversation) -> Conversation:
        if sum(message["role"] == "tool" for message in conversation) == 0:
            return conversation
        owners = {id(result): call for result, call in matched(conversation)}
        callers = {id(call): id(message) for message in conversation for call in calls_of(message)}
        moved: dict[int, Conversation] = {}  # message with calls -> its results that are elsewhere
        stays: Conversation = []
        for message in conversation:
            call = owners.get(id(message))
            if call is not None and not self._takes_behind(stays[-1]):
                moved.setdefault(callers[id(call)], []).append(message)
            else:
                stays.append(message)
        found = _with_moved(stays, moved) if moved else stays
        if self.shows_order(found):
            return found
        return self._in_order_of_calls(found, owners)

    def shows_order(self, conversation: Conversation) -> bool:
        """Whether results may keep their order."""
        return all(len(calls_of(message)) < 2 for message in conversation) or self.shows_ids

    def _takes_behind(self, before: Message) -> bool:
        """Whether the template takes a result behind this message."""
        kind = kind_of(before)
        is_turn = kind in (Kind.CALLS, Kind.RESULT)
        return is_turn or self._neighbours.remedy(kind, Kind.RESULT) == Remedy.NOTHING

    def _in_order_of_calls(self, conversation: Conversation, owners: dict[int, dict[str, Any] | None]) -> Conversation:
        numbers = {id(call): i for i, call in enumerate(c for message in conversation for c in calls_of(message))}
        found: Conversation = []
        block: Conversation = []
        for message in [*conversation, None]:
            if message is not None and message["role"] == "tool":
                block.append(message)
                continue
            block.sort(key=lambda result: numbers.get(id(owners[id(result)]), len(numbers)))
            found += block
            block = []
            if message is not None:
                found.append(message)
        return found


def _with_moved(stays: Conversation, moved: dict[int, Conversation]) -> Conversation:
    """Results that are moved come behind the other results of their turn."""
    found: Conversation = []
    waiting: Conversation = []
    for message in stays:
        if kind_of(message) not in (Kind.CALLS, Kind.RESULT):
            found += waiting
            waiting = []
        found.append(message)
        waiting += moved.get(id(message), [])
    return found + waiting


class SingleCalls:
    """Where a template takes one call in a message, each call is a message of its own, with its results right behind it."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def takes_parallel(self) -> bool:
        (question, calling, result), texts = invented("ucr")
        second = _second_call()
        calls = {**calling, "tool_calls": [*calling["tool_calls"], *second["tool_calls"]]}
        results = [result, a_result(_RESULT, second["tool_calls"][0]["id"])]
        wanted = [*texts[:2], _SECOND, texts[2], _RESULT]
        single = [question, calling, result, second, results[1]]
        return self._probe.writes([question, calls, *results], wanted) or not self._probe.writes(
            single, [*texts, _SECOND, _RESULT]
        )

    def arrange(self, conversation: Conversation) -> Conversation:
        if not _has_parallel(conversation) or self.takes_parallel:
            return conversation
        owners = {id(result): None if call is None else id(call) for result, call in matched(conversation)}
        found: Conversation = []
        at = 0
        while at < len(conversation):
            end = at
            while end < len(conversation) and kind_of(conversation[end]) in (Kind.CALLS, Kind.RESULT):
                end += 1
            found += _singly(conversation[at:end], owners) if end > at else [conversation[at]]
            at = max(end, at + 1)
        return found


def _has_parallel(conversation: Conversation) -> bool:
    """Whether there is a call right behind another one, in the same message or in the next."""
    kinds = [kind_of(message) for message in conversation]
    in_next = any(pair == (Kind.CALLS, Kind.CALLS) for pair in itertools.pairwise(kinds))
    return in_next or any(len(calls_of(message)) > 1 for message in conversation)


def _singly(turn: Conversation, owners: dict[int, int | None]) -> Conversation:
    """The text and the thoughts of a message stay with its first call."""
    results: dict[int | None, Conversation] = {}
    for message in turn:
        if message["role"] == "tool":
            results.setdefault(owners[id(message)], []).append(message)
    found: Conversation = []
    for message in turn:
        for number, call in enumerate(calls_of(message)):
            rest = {"role": message["role"]} if number else message
            found.append({**rest, "tool_calls": [call]})
            found += results.pop(id(call), [])
    return found + [result for others in results.values() for result in others]


class TextBesideCalls:
    """Where a template loses the text of a message with calls, or refuses it beside a thought, the text is an answer of its own
    before the calls, or a part of the thought."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    @cached_property
    def takes_text(self) -> bool:
        return self._is_written(_beside(_TEXT)) or not self._takes_split

    @cached_property
    def takes_thought(self) -> bool:
        """Whether a message with a call may have a text and a thought."""
        message = _beside(_TEXT)
        set_reasoning(message, _THOUGHT)
        return self._is_written(message)

    @cached_property
    def joins_thought(self) -> bool:
        """Whether a thought may be written before the text, in the same field."""
        message = _beside(f"{_THOUGHT}\n\n{_TEXT}")
        return self._is_written(message, _THOUGHT) and self._is_written(message)

    def arrange(self, conversation: Conversation) -> Conversation:
        found: Conversation = []
        for message in conversation:
            if not (message.get("tool_calls") and message.get("content")):
                found.append(message)
            elif not self.takes_text:
                found += _split(message)
            elif message.get("reasoning_content") and not self.takes_thought and self.joins_thought:
                found.append(_with_thought_in_text(message))
            else:
                found.append(message)
        return found

    def _is_written(self, message: Message, text: str = _TEXT) -> bool:
        """Whether the text and the call of a message are written before the result."""
        (question, _, result), _ = invented("ucr")
        turn = [question, message, {**result, "content": _RESULT}]
        return self._probe.writes(turn, [text, _RESULT]) and self._probe.writes(turn, [_ARGUMENT, _RESULT])

    @cached_property
    def _takes_split(self) -> bool:
        return self._probe.takes("uacr") and self._probe.takes("uacrau")


def _beside(text: str) -> dict[str, Any]:
    message = invented("uc")[0][1]
    message["tool_calls"][0]["function"]["arguments"] = {ARGUMENT: _ARGUMENT}
    return {**message, "content": text}


def _split(message: dict[str, Any]) -> Conversation:
    first = {key: value for key, value in message.items() if key not in ("tool_calls", *REASONING_FIELDS)}
    second = {key: value for key, value in message.items() if key != "content"}
    return [first, second]


def _with_thought_in_text(message: dict[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key not in REASONING_FIELDS}
    return {**made, "content": join_contents([message["reasoning_content"], message["content"]])}


def _second_call() -> dict[str, Any]:
    return a_call({ARGUMENT: _SECOND}, "abcdefgh9")
