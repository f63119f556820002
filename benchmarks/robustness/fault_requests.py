"""The mixed load of `benchmarks.faults`: the requests of each client, and how two answers to one request are compared.

Each request is drawn from (seed, client, index), so two runs send the same requests. Every request that samples has a seed of
its own. So the answers do not depend on the server's state, and a run without faults is the truth for a run with faults.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("greedy", "sampled", "json schema", "tools", "stop strings", "logprobs", "n=2", "penalties")
MAX_LOGPROB_DIFFERENCE = 1e-3  # recomputed tokens are computed in other batches, so the last bits of a sum differ
_NAMES = ("Anna", "Mia", "Tom", "Ben", "Lena", "Paul")
_PLACES = ("Oslo", "Rome", "Paris", "Berlin", "Madrid")
_THINGS = ("fox", "river", "lamp", "boat", "garden", "cat")
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load.

    Attributes:
        name: the client, the index and the kind, for messages.
        path: of the endpoint.
        body: JSON of the request.
    """

    name: str
    path: str
    body: Mapping[str, Any]  # Any: JSON

    @property
    def is_stream(self) -> bool:
        return bool(self.body["stream"])

    def with_cache_salt(self, salt: str) -> LoadRequest:
        """The same request in a prefix cache of its own, so that a second run computes its prompt again."""
        return LoadRequest(self.name, self.path, {**self.body, "cache_salt": salt})


def draw_requests(seed: int, num_clients: int, num_requests: int, max_tokens: int) -> list[list[LoadRequest]]:
    """Returns `num_requests` requests for each client. Each kind occurs equally often, half of them as streams."""
    return [
        [_draw(random.Random(f"{seed} {client} {index}"), client, index, max_tokens) for index in range(num_requests)]
        for client in range(num_clients)
    ]


def _draw(rng: random.Random, client: int, index: int, max_tokens: int) -> LoadRequest:
    kind = KINDS[(client + index) % len(KINDS)]
    name, place, thing = rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_THINGS)
    seed, length = rng.randrange(2**31), rng.randrange(max_tokens // 4, max_tokens + 1)
    story = f"Tell me a story about a {thing} named {name} in {place}, number {rng.randrange(1000)}."
    common = {"max_tokens": length, "temperature": 0.0, "stream": rng.random() < 0.5, "return_token_ids": True}
    sampled = {"temperature": 0.8, "seed": seed}
    chat: dict[str, Any] | None = None
    text: dict[str, Any] = {}
    match kind:
        case "sampled":
            text = {**sampled, "top_p": 0.9, "min_tokens": length // 2}
        case "json schema":
            schema = {"name": "person", "schema": _PERSON}
            content = f"Extract name and age as JSON: {name} is {rng.randrange(5, 90)} years old and lives in {place}."
            chat = {
                "messages": _user(content),
                "response_format": {"type": "json_schema", "json_schema": schema},
                **sampled,
            }
        case "tools":
            function = {"name": "get_weather", "parameters": _WEATHER, "strict": True}
            chat = {
                "messages": _user(f"How is the weather in {place} in {rng.randrange(1, 9)} days?"),
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
                **sampled,
            }
        case "stop strings":
            text = {**sampled, "stop": [f"{thing} ", ". He", "ing t"]}
        case "logprobs":
            text = {"logprobs": 2}
        case "n=2":
            text = {**sampled, "n": 2}
        case "penalties":
            text = {**sampled, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    label = f"client {client}, request {index} ({kind})"
    if chat is not None:
        return LoadRequest(label, "/v1/chat/completions", {**common, **chat, "max_tokens": max(length, 48)})
    return LoadRequest(label, "/v1/completions", {**common, "prompt": story, "ignore_eos": kind == "greedy", **text})


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@dataclass
class Choice:
    """One of the n sequences of an answer, whether it came as a stream or in one piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tool_calls: dict[int, tuple[str, str]] = field(default_factory=dict)  # by index: name, arguments
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add an event's choice, or the choice of an answer in one piece."""
        message = piece.get("delta") or piece.get("message") or {}
        self.text += piece.get("text") or message.get("content") or ""
        self.token_ids += piece.get("token_ids") or []
        for place, call in enumerate(message.get("tool_calls") or []):
            index = call.get("index", place)
            name, arguments = self.tool_calls.get(index, ("", ""))
            function = call["function"]
            self.tool_calls[index] = name + (function.get("name") or ""), arguments + (function.get("arguments") or "")
        if logprobs := piece.get("logprobs"):
            self.logprobs += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        self.finish_reason = piece.get("finish_reason") or self.finish_reason


class BadAnswer(Exception):
    """The answer is an error, or it is not complete."""


def read_answer(bodies: Iterable[Mapping[str, Any]]) -> list[Choice]:
    """Returns the choices of an answer.

    Args:
        bodies: the JSON of all events of a stream, or the one body of another answer.

    Raises:
        BadAnswer: the answer contains an error, has no choice, or a choice has no finish reason.
    """
    choices: dict[int, Choice] = {}
    for body in bodies:
        if "error" in body:
            raise BadAnswer(json.dumps(body["error"]))
        for piece in body["choices"]:
            choices.setdefault(piece["index"], Choice()).add(piece)
    if not choices or not all(choice.finish_reason for choice in choices.values()):
        raise BadAnswer(f"it ended without a finish reason: {choices}")
    return [choices[index] for index in sorted(choices)]


def difference(truth: list[Choice], found: list[Choice]) -> str:
    """Returns what differs between two answers to the same request, or "" if nothing does."""
    if len(truth) != len(found):
        return f"{len(found)} choices instead of {len(truth)}"
    for index, (before, after) in enumerate(zip(truth, found, strict=True)):
        for name in ("token_ids", "text", "tool_calls", "finish_reason"):
            expected, seen = getattr(before, name), getattr(after, name)
            if expected != seen:
                return f"{name} of choice {index}: {seen!r} instead of {expected!r}"
        if [token for token, _ in before.logprobs] != [token for token, _ in after.logprobs]:
            return f"tokens of the logprobs of choice {index}"
        pairs = zip(before.logprobs, after.logprobs, strict=True)
        if any(abs(first - second) > MAX_LOGPROB_DIFFERENCE for (_, first), (_, second) in pairs):
            return f"logprobs of choice {index}: {after.logprobs} instead of {before.logprobs}"
    return ""
