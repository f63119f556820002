"""`GrammarSpec`: a constraint as a cache key. `parse_structural_tag`: checks a structural tag and takes it apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from inflight.errors import InvalidRequestError
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
        whitespace: a regex of what may be between JSON tokens; "" is nothing. Other kinds ignore it.
        separators: what is between the items of JSON, and between key and value. If `whitespace` is set, it is "," and ":".
        is_lenient: leave out of a JSON schema what cannot be enforced. A structural tag has `SchemaPart`s instead.
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
        """What its author calls the constraint: "tools" for a structural tag that was made of a request's tools."""
        if self.kind == "structural_tag" and any(tag.parts for tag in parse_structural_tag(self.text).all_tags):
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
        name: for messages, as "tools[0] ('f')".
        is_strict: refuse what cannot be enforced. If False, it is left out.
    """

    pointer: str
    name: str
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Tag:
    """One structure of a structural tag: `begin`, JSON by `schema`, `end`. `trigger` is the trigger that `begin` starts with.

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
        separator: None for tags anywhere in free text. Otherwise the text is either tags with the separator between them and
            nothing else, or free text that does not begin with a trigger (after leading white space).
        at_least_one: the text is tags, not free text.
        stop_after_first: the text ends after the first tag.
        otherwise: a structure that the text may be instead of tags; free text is then not allowed. Its trigger is "".
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


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool  # Any: JSON
    end: str
    parts: tuple[SchemaPart, ...] = ()

    def tag(self, triggers: list[str], where: str) -> Tag:
        matching = [trigger for trigger in triggers if self.begin.startswith(trigger)]
        if len(matching) != 1:
            found = " and ".join(map(repr, matching)) or "none of them"
            raise InvalidRequestError(
                f"structural_tag: {where}: begin={self.begin!r} must start with exactly one trigger, and starts with {found}"
            )
        return Tag(matching[0], self.begin, self.schema, self.end, self.parts)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a structural tag."""

    type: Literal["structural_tag"]
    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1)]
    triggers: list[str]
    separator: str | msgspec.UnsetType = msgspec.UNSET
    at_least_one: bool = False
    stop_after_first: bool = False
    otherwise: _Structure | msgspec.UnsetType = msgspec.UNSET


def parse_structural_tag(text: str) -> StructuralTag:
    """`{"type": "structural_tag", "structures": [...], "triggers": [...]}`, as vLLM and xgrammar take it.

    It may also have the keys `separator`, `at_least_one`, `stop_after_first` and `otherwise` (a structure), see
    `StructuralTag`, and a structure the key `parts`, see `SchemaPart`.

    Raises:
        InvalidRequestError: another shape, or a `begin` that does not start with exactly one of the triggers.
    """
    try:
        document = msgspec.convert(json.loads(text), _Document)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"structural_tag: {error}; docs/structured-output.md has its fields") from error
    separator = None if document.separator is msgspec.UNSET else document.separator
    if document.at_least_one and separator is None:
        raise InvalidRequestError("structural_tag: at_least_one needs a separator between two tags")
    otherwise = None
    if document.otherwise is not msgspec.UNSET:
        if separator is None or document.at_least_one:
            raise InvalidRequestError("structural_tag: otherwise needs a separator, and excludes at_least_one")
        otherwise = document.otherwise.tag([""], "otherwise")
    elif "" in document.triggers:  # only free text must be kept from beginning with a trigger
        raise InvalidRequestError(f"structural_tag: triggers={document.triggers!r} has an empty string")
    tags = [each.tag(document.triggers, f"structures[{i}]") for i, each in enumerate(document.structures)]
    for trigger in document.triggers:
        if not any(tag.trigger == trigger for tag in tags):
            raise InvalidRequestError(f"structural_tag: no structure begins with the trigger {trigger!r}")
    return StructuralTag(tuple(tags), separator, document.at_least_one, document.stop_after_first, otherwise)
