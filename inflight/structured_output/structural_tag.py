"""Reads a structural tag: a JSON document, defined by vLLM and xgrammar, that describes free text with tags in it.

msgspec checks the fields. Offline generation also works where msgspec is not installed, so this module is imported only when a
structural tag is read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from inflight.errors import InvalidRequestError
from inflight.structured_output.spec import SchemaPart, StructuralTag, Tag


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
                f"structural_tag: {where}: begin={self.begin!r} must start with exactly one trigger, but starts with {found}"
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
    """Read `{"type": "structural_tag", "structures": [...], "triggers": [...]}`, which vLLM and xgrammar also accept.

    The document may also have our own keys `separator`, `at_least_one`, `stop_after_first` and `otherwise` (a structure); see
    `StructuralTag`. A structure may also have the key `parts`; see `SchemaPart`.

    Raises:
        InvalidRequestError: the text is not such a document, or a `begin` does not start with exactly one of the triggers.
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
            raise InvalidRequestError(
                "structural_tag: otherwise needs a separator, and must not be used with at_least_one"
            )
        otherwise = document.otherwise.tag([""], "otherwise")
    elif "" in document.triggers:  # every free text would begin with an empty trigger
        raise InvalidRequestError(
            f"structural_tag: triggers={document.triggers!r} has an empty string; give the text that starts a tag"
        )
    tags = [each.tag(document.triggers, f"structures[{i}]") for i, each in enumerate(document.structures)]
    for trigger in document.triggers:
        if not any(tag.trigger == trigger for tag in tags):
            raise InvalidRequestError(f"structural_tag: no structure begins with the trigger {trigger!r}")
    return StructuralTag(tuple(tags), separator, document.at_least_one, document.stop_after_first, otherwise)
