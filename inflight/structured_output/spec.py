"""`GrammarSpec`: what a backend compiles, equal for equal constraints; and structural tags taken apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.sampling_params import StructuredOutputsParams

MAX_WHITESPACE = 64  # characters in a row between two JSON tokens; without a bound some models never come to an end
DEFAULT_WHITESPACE = rf"[\x20\x09\x0A\x0D]{{1,{MAX_WHITESPACE}}}"

_COMPACT = (",", ":")
_OPTIONS = ("separator", "at_least_one", "stop_after_first", "otherwise")
_DOCUMENT_FIELDS = frozenset({"type", "structures", "triggers", *_OPTIONS})
_KNOWN_FIELDS = ", ".join(sorted(_DOCUMENT_FIELDS))
_TAG_FIELDS = ("begin", "schema", "end")
RESPONSE_FORMAT = "response_format"  # name of the schema of a `lenient` constraint in messages


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint, hashable: the key of the cache of compiled grammars.

    Attributes:
        kind: one of `sampling_params.CONSTRAINTS`.
        text: the schema, regex, grammar or tag as its user wrote it; the choices as a JSON list; "{}" for json_object.
        whitespace: a regex of what may stand between JSON tokens; "" is nothing. Of no meaning for other kinds.
        separators: what stands between the items of JSON, and behind a key. More than "," and ":" without `whitespace` only.
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
        """The constraint in its author's words: a structural tag that was made of a request's tools is called "tools"."""
        if self.kind == "structural_tag" and any(tag.parts for tag in parse_structural_tag(self.text).all_tags):
            return "tools"
        return self.kind

    def choices(self) -> list[str]:
        assert self.kind == "choice"
        choices: list[str] = json.loads(self.text)
        return choices


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A place in a schema that has another author than the rest of the schema.

    Attributes:
        pointer: JSON pointer of the place: "#" for the whole schema, or "#/items/anyOf/0".
        name: for messages, as "tools[0] ('f')".
        is_strict: refuse what cannot be enforced. If False, it is left out.
    """

    pointer: str
    name: str
    is_strict: bool

    def as_json(self) -> list[object]:
        return [self.pointer, self.name, self.is_strict]


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
        separator: None for tags anywhere in free text. Else the text is tags and nothing else, with this between two of them,
            or it is free text that does not begin with a trigger, white space before it left aside.
        at_least_one: it is tags.
        stop_after_first: the text ends behind the first tag.
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


def parse_structural_tag(text: str) -> StructuralTag:
    """`{"type": "structural_tag", "structures": [...], "triggers": [...]}`, as vLLM and xgrammar take it.

    It may also have the keys `separator`, `at_least_one`, `stop_after_first` and `otherwise` (a structure), see
    `StructuralTag`, and a structure the key `parts`, see `SchemaPart`.

    Raises:
        InvalidRequestError: another shape, or a `begin` that does not start with exactly one of the triggers.
    """
    document = json.loads(text)
    if unknown := sorted(set(document) - _DOCUMENT_FIELDS):
        raise InvalidRequestError(f"structural_tag has the unknown key {unknown[0]!r}; known are {_KNOWN_FIELDS}")
    if document.get("type") != "structural_tag" or not {"structures", "triggers"} <= set(document):
        raise InvalidRequestError(
            'structural_tag must have the shape {"type": "structural_tag", "structures": '
            f'[{{"begin", "schema", "end"}}], "triggers": [...]}}; it has the keys {sorted(document)}'
        )
    structures, triggers = document["structures"], document["triggers"]
    if not isinstance(structures, list) or not structures:
        raise InvalidRequestError("structural_tag: structures must be a list with at least one entry")
    has_free_text = "otherwise" not in document  # only free text must be kept from beginning with a trigger
    if not isinstance(triggers, list) or not all(
        isinstance(trigger, str) and (trigger or not has_free_text) for trigger in triggers
    ):
        raise InvalidRequestError(f"structural_tag: triggers={triggers!r} is not a list of non-empty strings")
    tags = [_parse_structure(f"structures[{i}]", structure, triggers) for i, structure in enumerate(structures)]
    for trigger in triggers:
        if not any(tag.trigger == trigger for tag in tags):
            raise InvalidRequestError(f"structural_tag: no structure begins with the trigger {trigger!r}")
    return StructuralTag(tuple(tags), **_parse_options(document))


def _parse_options(document: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    options = {name: document[name] for name in _OPTIONS if name in document}
    for name, value in options.items():
        if name == "otherwise":
            if "separator" not in options or options.get("at_least_one"):
                raise InvalidRequestError("structural_tag: otherwise needs a separator, and excludes at_least_one")
            options[name] = _parse_structure("otherwise", value, [""])
        elif not isinstance(value, str if name == "separator" else bool):
            kind = "a string" if name == "separator" else "true or false"
            raise InvalidRequestError(f"structural_tag: {name}={value!r} is not {kind}")
    if options.get("at_least_one") and "separator" not in options:
        raise InvalidRequestError("structural_tag: at_least_one needs a separator, that stands between two tags")
    return options


def _parse_structure(where: str, structure: object, triggers: list[str]) -> Tag:
    where = f"structural_tag: {where}"
    if not isinstance(structure, Mapping) or set(structure) - {"parts"} != set(_TAG_FIELDS):
        raise InvalidRequestError(f"{where} must be an object with the keys {', '.join(_TAG_FIELDS)}")
    begin, schema, end = (structure[field] for field in _TAG_FIELDS)
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(f"{where}: begin and end must be strings, and schema a JSON schema")
    matching = [trigger for trigger in triggers if begin.startswith(trigger)]
    if len(matching) != 1:
        found = " and ".join(map(repr, matching)) or "none of them"
        raise InvalidRequestError(
            f"{where}: begin={begin!r} must start with exactly one trigger, and starts with {found}"
        )
    return Tag(matching[0], begin, schema, end, _parse_parts(where, structure.get("parts", ())))


def _parse_parts(where: str, parts: object) -> tuple[SchemaPart, ...]:
    try:
        found = [SchemaPart(pointer, name, is_strict) for pointer, name, is_strict in parts]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = None
    if found is None or not all(
        isinstance(part.pointer, str) and isinstance(part.name, str) and isinstance(part.is_strict, bool)
        for part in found
    ):
        raise InvalidRequestError(f"{where}: parts must be a list of [pointer, name, whether it is strict]")
    return tuple(found)
