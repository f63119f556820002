"""Reads a structural tag: a JSON document, defined by vLLM, that describes free text with tags in it.

msgspec checks the fields. Offline generation also works where msgspec is not installed, so this module is imported only when a
structural tag is read.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from inflight.errors import InvalidRequestError
from inflight.structured_output.spec import ArgumentTags, SchemaPart


class Tag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One structure: the text `begin`, then JSON that satisfies `schema`, then the text `end`.

    `parts`: the schemas from which `schema` was put together; empty if the user wrote `schema` as a whole.
    `arguments`: if given, the object is not written as JSON, but each of its properties stands between these tags.
    """

    begin: str
    schema: dict[str, Any] | bool  # Any: JSON
    end: str
    parts: tuple[SchemaPart, ...] = ()
    arguments: ArgumentTags | None = None


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """
    Attributes:
        triggers: in free text, a trigger marks the start of a tag. The `begin` of each tag starts with exactly one of them.
        separator: if None, tags may be anywhere in free text. Otherwise the text has only tags with the separator between
            them, or it is free text that does not begin with a trigger (after leading white space).
        at_least_one: whether the text must have tags, so that free text is not allowed instead.
        stop_after_first: whether the text ends after the first tag.
        otherwise: one structure that is allowed instead of tags; free text is then not allowed.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    separator: str | None = None
    at_least_one: bool = False
    stop_after_first: bool = False
    otherwise: Tag | None = None

    @property
    def all_tags(self) -> tuple[Tag, ...]:
        if self.otherwise is None:
            return self.tags
        return (*self.tags, self.otherwise)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a structural tag."""

    type: Literal["structural_tag"]
    structures: Annotated[tuple[Tag, ...], msgspec.Meta(min_length=1)]
    triggers: tuple[str, ...]
    separator: str | msgspec.UnsetType = msgspec.UNSET
    at_least_one: bool = False
    stop_after_first: bool = False
    otherwise: Tag | msgspec.UnsetType = msgspec.UNSET


# msgspec learns the fields now: if two threads were the first to use them, it would crash
msgspec.json.Decoder(_Document)


def parse_structural_tag(text: str) -> StructuralTag:
    """Read `{"type": "structural_tag", "structures": [...], "triggers": [...]}`, which vLLM also accepts.

    The document may also have our own keys `separator`, `at_least_one`, `stop_after_first` and `otherwise` (a structure); see
    `StructuralTag`. A structure may also have the key `parts`; see `SchemaPart`.

    Raises:
        InvalidRequestError: the text is not such a document, or a `begin` does not start with exactly one of the triggers.
    """
    try:
        document = msgspec.convert(json.loads(text), _Document)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"structural_tag: {error}; docs/structured-output.md has its fields", "structural_tag"
        ) from error
    separator = None if document.separator is msgspec.UNSET else document.separator
    otherwise = None if document.otherwise is msgspec.UNSET else document.otherwise
    triggers = document.triggers
    if document.at_least_one and separator is None:
        raise InvalidRequestError("structural_tag: at_least_one needs a separator between two tags", "structural_tag")
    if otherwise is not None and (separator is None or document.at_least_one):
        raise InvalidRequestError(
            "structural_tag: otherwise needs a separator, and must not be used with at_least_one", "structural_tag"
        )
    if otherwise is None and "" in triggers:  # every free text would begin with an empty trigger
        raise InvalidRequestError(
            f"structural_tag: triggers={list(triggers)!r} has an empty string; give the text that starts a tag",
            "structural_tag",
        )
    for i, tag in enumerate(document.structures):
        matching = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(matching) != 1:
            found = " and ".join(map(repr, matching)) or "none of them"
            raise InvalidRequestError(
                f"structural_tag: structures[{i}]: begin={tag.begin!r} must start with exactly one trigger, but starts with "
                f"{found}",
                "structural_tag",
            )
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in document.structures):
            raise InvalidRequestError(
                f"structural_tag: no structure begins with the trigger {trigger!r}", "structural_tag"
            )
    return StructuralTag(
        document.structures, triggers, separator, document.at_least_one, document.stop_after_first, otherwise
    )
