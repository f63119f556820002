"""`GrammarSpec`: what a request's output must match. `StructuralTag`: a format of free text with tags that contain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.sampling_params import StructuredOutputsParams

MAX_WHITESPACE = 64  # characters between two JSON tokens; without this limit some models emit white space forever
DEFAULT_WHITESPACE = rf"[\x20\x09\x0A\x0D]{{1,{MAX_WHITESPACE}}}"

_COMPACT = (",", ":")
RESPONSE_FORMAT = "response_format"  # error messages use it as the name of the schema if `is_lenient`


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request's output must match (a constraint). It is hashable: the key of the cache of compiled grammars.

    Attributes:
        kind: one of `sampling_params.CONSTRAINTS`.
        text: the schema, regex, grammar or structural tag as the user wrote it. For `choice` a JSON list of the choices, and
            for `json_object` "{}".
        whitespace: a regex for the white space that may be between JSON tokens; "" allows none. Kinds without JSON ignore it.
        separators: the text between JSON items, and between key and value. If `whitespace` is not "", these are "," and ":".
        is_lenient: whether keywords of a JSON schema that cannot be enforced are left out instead of refused. In a structural
            tag each schema has its own setting (`SchemaPart.is_strict`).
    """

    kind: str
    text: str
    whitespace: str = DEFAULT_WHITESPACE
    separators: tuple[str, str] = _COMPACT
    is_lenient: bool = False

    @classmethod
    def from_params(cls, params: StructuredOutputsParams) -> GrammarSpec:
        kind = params.constraint
        if kind == "choice":
            text = json.dumps(list(dict.fromkeys(params.choice or ())), ensure_ascii=False)
        elif kind == "json_object":
            text = "{}"
        else:
            text = getattr(params, kind)
        if params.disable_any_whitespace or params.separators is not None:
            return cls(kind, text, "", params.separators or _COMPACT, params.lenient)
        return cls(kind, text, params.whitespace_pattern or DEFAULT_WHITESPACE, is_lenient=params.lenient)

    @property
    def subject(self) -> str:
        """The constraint's name in messages: "tools" for a structural tag that was made of a request's tools."""
        if self.kind == "structural_tag":
            from inflight.structured_output.structural_tag import parse_structural_tag  # needs msgspec

            if any(tag.parts for tag in parse_structural_tag(self.text).all_tags):
                return "tools"
        return self.kind

    def choices(self) -> list[str]:
        assert self.kind == "choice"
        choices: list[str] = json.loads(self.text)
        return choices


class SchemaPart(NamedTuple):
    """A part of a schema that was written separately from the rest, for example the schema of one tool.

    Attributes:
        pointer: the JSON pointer of the part, such as "#/items/anyOf/0"; "#" for the whole schema.
        name: the name of the part in error messages, such as "tools[0] ('f')".
        is_strict: whether keywords that cannot be enforced are refused. If false, they are left out.
    """

    pointer: str
    name: str
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Tag:
    """One structure of a structural tag: the text `begin`, then JSON that satisfies `schema`, then the text `end`.

    Attributes:
        trigger: the text with which `begin` starts. In free text it marks the start of a tag.
        parts: the schemas from which `schema` was put together; empty if the user wrote `schema` as a whole.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any] | bool  # Any: JSON
    end: str
    parts: tuple[SchemaPart, ...] = ()


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """
    Attributes:
        separator: if None, tags may be anywhere in free text. Otherwise the text has only tags with the separator between
            them, or it is free text that does not begin with a trigger (after leading white space).
        at_least_one: whether the text must have tags, so that free text is not allowed instead.
        stop_after_first: whether the text ends after the first tag.
        otherwise: one structure that is allowed instead of tags; free text is then not allowed. Its trigger is "".
    """

    tags: tuple[Tag, ...]
    separator: str | None = None
    at_least_one: bool = False
    stop_after_first: bool = False
    otherwise: Tag | None = None

    @property
    def all_tags(self) -> tuple[Tag, ...]:
        return self.tags if self.otherwise is None else (*self.tags, self.otherwise)

    @property
    def triggers(self) -> list[str]:
        return list(dict.fromkeys(tag.trigger for tag in self.tags))
