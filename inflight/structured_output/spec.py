"""`GrammarSpec`: a constraint as a cache key. `StructuralTag`: text that may contain tags, and what is in each tag."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.sampling_params import StructuredOutputsParams

MAX_WHITESPACE = 64  # characters in a row between two JSON tokens; without a bound some models never come to an end
DEFAULT_WHITESPACE = rf"[\x20\x09\x0A\x0D]{{1,{MAX_WHITESPACE}}}"

_COMPACT = (",", ":")
RESPONSE_FORMAT = "response_format"  # name of the schema of a `lenient` constraint in messages


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint, hashable: the key of the cache of compiled grammars.

    Attributes:
        kind: one of `sampling_params.CONSTRAINTS`.
        text: the schema, regex, grammar or tag as its user wrote it; the choices as a JSON list; "{}" for json_object.
        whitespace: a regex for the text that may be between JSON tokens; "" allows no text. Kinds without JSON ignore it.
        separators: the text between JSON items, and between key and value. If `whitespace` is set, they are "," and
            ":".
        is_lenient: whether keywords of a JSON schema that cannot be enforced are left out instead of refused. For a
            structural tag each `SchemaPart` has this choice.
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
    """A place in a schema that has another author than the rest of the schema.

    Attributes:
        pointer: JSON pointer of the place: "#" for the whole schema, or "#/items/anyOf/0".
        name: the name in error messages, such as "tools[0] ('f')".
        is_strict: whether keywords that cannot be enforced are refused. If not, they are left out.
    """

    pointer: str
    name: str
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Tag:
    """One structure of a structural tag: the text `begin`, JSON that satisfies `schema`, and the text `end`. `trigger` is the
    trigger that `begin` starts with.

    `parts`: the schemas that `schema` was made of; empty if the author of the tag wrote it.
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
        separator: None if tags may be anywhere in free text. Otherwise the text is either tags with the separator
            between them and nothing else, or free text that does not begin with a trigger (after leading white space).
        at_least_one: whether the text must be tags, not free text.
        stop_after_first: whether the text ends after the first tag.
        otherwise: a structure that the text may be instead of tags. If it is set, free text is not allowed. Its trigger
            is "".
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
