"""A walk over a JSON schema before it is compiled: what cannot be enforced is refused, with its path in the schema.

JSON Schema (draft 2020-12, and the older spellings `definitions`, `items` as a list, `additionalItems`) says that keywords it
does not define are ignored, and so are they here. One that it does define, and a backend does not enforce, would silently
let wrong text through: it is named. Only what can be reached is read: a definition that nothing refers to is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import InvalidRequestError

MAX_DEPTH = 100  # the compilers recurse
MAX_NODES = 50_000
MAX_COUNT = 2**31 - 1

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

_SCHEMA = frozenset({"not", "if", "then", "else", "additionalProperties", "propertyNames", "unevaluatedProperties"})
_SCHEMA |= {"contains", "additionalItems", "unevaluatedItems"}
_SCHEMA_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_COUNTS |= {"minContains", "maxContains"}
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OTHERS = frozenset({"type", "enum", "const", "pattern", "format", "required", "items", "uniqueItems", "$ref"})
_OTHERS |= {"dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef"}

# All that can make a value invalid.
ASSERTIONS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _COUNTS | _NUMBERS | _OTHERS


@dataclass(frozen=True)
class SchemaSupport:
    """What a backend enforces.

    Attributes:
        keywords: those of `ASSERTIONS` that it enforces.
        formats: values of `format` that it enforces.
        exclusive: keyword -> the assertions that it may not stand beside.
    """

    keywords: frozenset[str]
    formats: frozenset[str] = frozenset()
    exclusive: Mapping[str, frozenset[str]] = field(default_factory=dict)


def check_schema(schema: object, support: SchemaSupport, where: str = "json") -> None:
    """Refuse what `support` does not cover, and what is no schema at all.

    Raises:
        InvalidRequestError: naming the path as a JSON pointer behind `where`: "json: #/properties/a/not is not supported".
    """
    _Walk(schema, support, where).run()


def subschemas(schema: object) -> Iterator[tuple[str, Mapping[str, Any]]]:  # Any: JSON
    """Every subschema that `check_schema` reads and has not refused, but true and false: (JSON pointer, subschema)."""
    return _Walk(schema, SchemaSupport(frozenset()), "").nodes()


def keyword_paths(schema: object, keyword: str) -> list[str]:
    """JSON pointers of every use of `keyword`; an approximation that also sees data under const and enum."""
    found: list[str] = []
    stack: list[tuple[object, str]] = [(schema, "#")]
    while stack:
        node, path = stack.pop()
        if isinstance(node, Mapping):
            found += [f"{path}/{keyword}"] if keyword in node else []
            stack += [(child, f"{path}/{_escape(key)}") for key, child in node.items()]
        elif isinstance(node, list):
            stack += [(child, f"{path}/{i}") for i, child in enumerate(node)]
    return sorted(found)


class _Walk:
    def __init__(self, schema: object, support: SchemaSupport, where: str) -> None:
        self._root = schema
        self._support = support
        self._where = where
        self._seen: set[str] = set()  # targets of $ref that were, or will be, walked

    def run(self) -> None:
        for path, node in self.nodes():
            self._check_keywords(node, path)

    def nodes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:  # Any: JSON
        stack: list[tuple[object, str, int]] = [(self._root, "#", 0)]
        num_nodes = 0
        while stack:
            node, path, depth = stack.pop()
            num_nodes += 1
            if num_nodes > MAX_NODES:
                raise self._refusal(path, f"is the schema's {num_nodes}th subschema; at most {MAX_NODES} are allowed")
            if depth > MAX_DEPTH:
                raise self._refusal(path, f"is nested more than {MAX_DEPTH} deep")
            if isinstance(node, bool):
                continue
            if not isinstance(node, Mapping):
                raise self._refusal(path, f"is {_name(node)}, not a schema (an object, true or false)")
            yield path, node
            stack += [(child, child_path, depth + 1) for child, child_path in self._children(node, path)]

    def _check_keywords(self, node: Mapping[str, Any], path: str) -> None:  # Any: JSON
        asserted = ASSERTIONS.intersection(node)
        for keyword in node:
            if keyword == "x-guidance":
                raise self._refusal(f"{path}/{keyword}", "is not supported: use whitespace_pattern or leave it out")
            if keyword in asserted:
                if keyword not in self._support.keywords:
                    raise self._refusal(f"{path}/{keyword}", "is not supported")
                self._check_value(keyword, node[keyword], f"{path}/{keyword}")
                if clash := self._support.exclusive.get(keyword, frozenset()) & asserted:
                    raise self._refusal(f"{path}/{keyword}", f"is not supported beside {', '.join(sorted(clash))}")

    def _check_value(self, keyword: str, value: object, path: str) -> None:
        if keyword in _COUNTS:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise self._refusal(path, f"is {_name(value)}, not an integer in [0, {MAX_COUNT}]")
        elif keyword in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._refusal(path, f"is {_name(value)}, not a number")
        elif keyword in ("pattern", "format", "$ref"):
            if not isinstance(value, str):
                raise self._refusal(path, f"is {_name(value)}, not a string")
            if keyword == "format" and value not in self._support.formats:
                allowed = ", ".join(sorted(self._support.formats))
                raise self._refusal(path, f"{value!r} is not supported; these are: {allowed}")
        elif keyword == "type":
            for name in value if isinstance(value, list) and value else [value]:
                if not isinstance(name, str) or name not in TYPES:
                    raise self._refusal(path, f"{name!r} is none of {', '.join(sorted(TYPES))}")
        elif keyword == "enum":
            if not isinstance(value, list) or not value:
                raise self._refusal(path, "is not a list with at least one value: nothing could be emitted")
        elif keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self._refusal(path, "is not a list of property names")

    def _children(self, node: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:  # Any: JSON
        for keyword, value in node.items():
            here = f"{path}/{keyword}"
            if keyword in _SCHEMA:
                yield value, here
            elif keyword in _SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise self._refusal(here, f"is {_name(value)}, not a list of schemas")
                yield from ((child, f"{here}/{i}") for i, child in enumerate(value))
            elif keyword == "items":
                yield value, here
            elif keyword in _SCHEMA_MAPS:
                if not isinstance(value, Mapping):
                    raise self._refusal(here, f"is {_name(value)}, not an object of schemas")
                yield from ((child, f"{here}/{_escape(name)}") for name, child in value.items())
            elif keyword == "$ref" and value not in self._seen:
                self._seen.add(value)
                yield self._resolve(value, here), value

    def _resolve(self, reference: str, path: str) -> object:
        """The target of "#/$defs/a"."""
        if reference == "#":
            return self._root
        if not reference.startswith("#/"):
            raise self._refusal(
                path, f"{reference!r} is not supported: a reference must be a path in the schema, #/..."
            )
        target: object = self._root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif (
                isinstance(target, Sequence)
                and not isinstance(target, str)
                and key.isdecimal()
                and int(key) < len(target)
            ):
                target = target[int(key)]
            else:
                raise self._refusal(path, f"{reference!r} does not exist")
        return target

    def _refusal(self, path: str, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._where}: {path} {problem}")


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _name(value: object) -> str:
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
