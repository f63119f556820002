"""`TaggedObject`: writes the grammar of an object whose properties stand between tags, in llguidance's notation. The named
arguments of Python, as in `f(city="Oslo")`, are such properties, too.

    <parameter=city>
    Paris
    </parameter>

The properties come in the order of the schema. Optional ones may be missing. Properties that the schema does not name are not
admitted. A value that may be a string is plain text up to the closing tag; any other value is JSON. The parsers of such calls
read values in the same way.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.structured_output.references import moved, referred
from inflight.structured_output.spec import SchemaPart
from inflight.structured_output.structural_tag import Tag

Schema = Mapping[str, Any]  # Any: JSON
_MAX_DEPTH = 16  # of references and branches inside each other
_MAX_PARTS = 4000  # of one object: each reference is followed anew, so a small schema may have very many
_ROOT = "whole"  # the name of the whole schema among the definitions of a property's schema
_NOT_IN_ROOT = (
    "anyOf oneOf not if patternProperties propertyNames minProperties dependentRequired dependentSchemas".split()
)
_NOT_IN_STRING = ("pattern", "format", "not", "if")


class TaggedObject:
    """
    Args:
        name: begins the names of the object's rules, so that they differ from the names of all other rules.
        write_text: writes a text as a Lark sequence.
        write_closed: writes a terminal and the text that closes it: (name of a new rule, terminal, text) -> the sequence, and
            the rules that it needs.
        json_options: llguidance's options for values that are JSON.
    """

    def __init__(
        self,
        name: str,
        tag: Tag,
        write_text: Callable[[str], str],
        write_closed: Callable[[str, str, str], tuple[str, list[str]]],
        json_options: Mapping[str, Any],
    ) -> None:
        assert tag.arguments is not None
        self.rules: list[str] = []
        self._name = name
        self._tags = tag.arguments
        self._part = tag.parts[0] if tag.parts else SchemaPart("#", "structural_tag", is_strict=True)
        self._root: Schema = tag.schema if isinstance(tag.schema, Mapping) else {}
        self._write_text = write_text
        self._write_closed = write_closed
        self._json_options = json_options
        self._text = f"{name.upper()}_TEXT"
        self._num_parts = 0

    def write(self) -> str:
        """Returns the Lark sequence of all properties. The rules that it needs are in `rules` afterwards.

        Raises:
            InvalidRequestError: the object is strict, and has a keyword that this form cannot enforce.
        """
        if not self._tags.is_json:
            any_text, tagged = f"{self._text}_ANY", f"{self._text}_TAGGED"
            never = " | ".join(map(json.dumps, self._tags.not_in_value))
            self.rules += [
                f"{any_text}: /(.|\\n)*/",
                f"{tagged}: {any_text} ({never}) {any_text}",
                f"{self._text}: {any_text} & ~{tagged}",
            ]
        properties, required = self._properties(self._root, 0)
        written: list[tuple[str, bool]] = []  # a property, and whether it must be there
        for key, schema in {**properties, **{name: properties.get(name, True) for name in required}}.items():
            if schema is False:
                continue
            opening = self._write_text(f"{self._tags.before_key}{key}{self._tags.after_key}")
            written.append((f"({opening} ({self._value(key, schema)}))", key in required))
        if self._tags.between:
            return self._joined(written)
        return " ".join(whole if is_required else f"{whole}?" for whole, is_required in written)

    def _joined(self, written: Sequence[tuple[str, bool]]) -> str:
        """Properties with a text between them. A rule for each property says what may come from there on: one rule if none has
        come before, and one if the text between two must come first."""
        between = self._write_text(self._tags.between)
        number = len(self.rules)
        for i, (whole, is_required) in enumerate(written):
            for kind, before in (("first", ""), ("next", between)):
                rest = f"{self._name}_{number}_next_{i + 1}"
                skipped = "" if is_required else f" | {self._name}_{number}_{kind}_{i + 1}"
                rule = f"{self._name}_{number}_{kind}_{i}"
                self.rules.append(f"{rule}: {before} {whole} {rest}{skipped}")
        self.rules += [f'{self._name}_{number}_{kind}_{len(written)}: ""' for kind in ("first", "next")]
        return f"{self._name}_{number}_first_0"

    def _properties(self, node: Schema, depth: int) -> tuple[dict[str, Any], list[str]]:
        """The properties of the object and the names of those that it must have."""
        self._refuse(node, _NOT_IN_ROOT, "#")
        self._count()
        properties = dict(_mapping(node.get("properties")))
        required = [name for name in node.get("required", ()) if isinstance(name, str)]
        parts = [self._target(node), *(part for part in node.get("allOf", ()) if isinstance(part, Mapping))]
        for part in parts if depth < _MAX_DEPTH else ():
            more, names = self._properties(part, depth + 1)
            properties = {**more, **properties}
            required += names
        return properties, list(dict.fromkeys(required))

    def _value(self, key: str, schema: Any) -> str:
        """The value of a property and its closing tag. If the value may be a string, only strings are allowed, because the
        parser would read JSON as a string, too."""
        if self._tags.is_json:
            return f"{self._json(schema if isinstance(schema, Mapping) else {})} {self._write_text(self._tags.after_value)}"
        closing = self._tags.after_value.replace("{key}", key)
        strings, others = self._choices(schema, f"#/properties/{key}", closing, 0)
        return " | ".join(dict.fromkeys(strings or others))

    def _choices(self, node: Any, where: str, closing: str, depth: int) -> tuple[list[str], list[str]]:
        """The alternatives for a value, each with the tag `closing`: those that are free text, and those that are constants or
        JSON."""
        self._count()
        end = self._write_text(closing)
        if not isinstance(node, Mapping):
            return [self._string(self._text, closing)], []
        node = self._whole(node)
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return [], [f"{self._write_text(text)} {end}" for text in texts]
        branches = node.get("anyOf") or node.get("oneOf")
        if isinstance(branches, list) and depth < _MAX_DEPTH:
            rest = {key: value for key, value in node.items() if key not in ("anyOf", "oneOf")}
            found = [self._choices({**rest, **_mapping(branch)}, where, closing, depth + 1) for branch in branches]
            return [each for strings, _ in found for each in strings], [each for _, some in found for each in some]
        types = node.get("type")
        if types == "string" or (isinstance(types, list) and "string" in types):
            self._refuse(node, _NOT_IN_STRING, where)
            return [self._string(self._limited_text(node), closing)], []
        return [], [f"{self._json(node)} {end}"]

    def _json(self, node: Schema) -> str:
        """A value that is JSON. Its references lead into the whole schema, which becomes a definition."""
        schema = moved(node, f"#/$defs/{_ROOT}")
        schema |= {"$defs": {_ROOT: moved(self._root, f"#/$defs/{_ROOT}")}, "x-guidance": self._json_options}
        return f"%json {json.dumps(schema)}"

    def _whole(self, node: Schema) -> dict[str, Any]:
        """The schema with what its "$ref" and "allOf" add."""
        whole = dict(node)
        for _ in range(_MAX_DEPTH):
            parts = [self._target(whole), *(part for part in whole.pop("allOf", ()) if isinstance(part, Mapping))]
            whole.pop("$ref", None)
            for part in filter(None, parts):
                whole = {**part, **whole}
            if "$ref" not in whole and "allOf" not in whole:
                break
        return whole

    def _limited_text(self, node: Schema) -> str:
        least = node.get("minLength", 0)
        most = node.get("maxLength")
        if not least and most is None:
            return self._text
        text = f"{self._text}_{len(self.rules)}"
        repetition = f"{{{int(least)},{'' if most is None else int(most)}}}"
        self.rules.append(f"{text}: /(.|\\n){repetition}/ & {self._text}")
        return text

    def _string(self, text: str, closing: str) -> str:
        sequence, rules = self._write_closed(f"{self._name}_{len(self.rules)}", text, closing)
        self.rules += rules
        return sequence

    def _target(self, node: Schema) -> Schema:
        """The schema that "$ref" refers to; empty if there is no reference, or if it leads nowhere."""
        reference = node.get("$ref")
        try:
            if not isinstance(reference, str):
                return {}
            return _mapping(referred(self._root, reference))
        except KeyError:
            return {}

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(
                f"{self._part.name}: its anyOf, oneOf and allOf, with the targets of their $ref, are more than {_MAX_PARTS} "
                "parts; at most so many are supported in calls of this model, whose arguments are not JSON",
                self._part.param,
            )

    def _refuse(self, node: Schema, keywords: Sequence[str], where: str) -> None:
        found = next((keyword for keyword in keywords if keyword in node), None)
        if self._part.is_strict and found is not None:
            raise InvalidRequestError(
                f"{self._part.name}: {where}/{found} is not supported in calls of this model, whose arguments are not JSON: "
                "leave it out, or set strict to false",
                self._part.param,
            )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
