"""Prepares a JSON schema for a grammar backend: keywords that the backend cannot enforce are refused, or left out and reported.

The standard is JSON Schema (draft 2020-12, with the older spellings `definitions`, `items` as a list, `additionalItems`).
Keywords that the standard does not define are ignored, as the standard demands. The table is about keywords that the standard
defines but the backend does not enforce. Each part of a schema is strict or lenient (`SchemaPart.is_strict`). "Reported" means
that `relax_schema` returns the keyword's place.

| | strict | lenient |
|---|---|---|
| `propertyNames` that every string satisfies, `uniqueItems: false` | left out: every value satisfies them | the same |
| null as the value of a keyword other than `const` and `type` | left out: it is absent | the same |
| `uniqueItems`, an unknown `format` (by the standard `format` is an annotation) | left out and reported | the same |
| in tools: a value that the standard does not allow (`"type": "any"`), a `$ref` to nothing | refused | left out and reported |
| the same in other schemas | refused, with the path in the schema | the same |
| all others | refused, with the path in the schema | left out and reported |

If a keyword is left out, the schema admits more texts, never fewer, and all other keywords are still enforced. A definition
without a reference to it is not read.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.structured_output.left_out import LeftOut
from inflight.structured_output.references import MAX_PATH_CHARACTERS, referred
from inflight.structured_output.spec import SchemaPart, SchemaPlace

MAX_DEPTH = 100  # how deep subschemas may be nested; there is a limit because the compilers recurse
MAX_NODES = 50_000
# Per object. The compile time grows with the square of this number: for 2000 it is 1 s.
MAX_PROPERTIES = 2000
MAX_PATTERN_PROPERTIES = 100  # per object; the compile time is 0.1 s for 100, and 3.5 s for 200
MAX_COUNT = 2**31 - 1

_OPTIONS = "x-guidance"  # llguidance's own keyword, with which a schema could change how it is compiled
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

_SCHEMA = frozenset("not if then else contains propertyNames additionalProperties unevaluatedProperties".split())
_SCHEMA |= {"additionalItems", "unevaluatedItems"}
_SCHEMA_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas"})
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in "Length Items Properties Contains".split())
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OTHERS = frozenset({"type", "enum", "const", "pattern", "format", "required", "uniqueItems", "dependencies", "$ref"})

WITH_SCHEMAS = _SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | {"items"}
# All keywords that can make a value invalid.
ASSERTIONS = WITH_SCHEMAS | _COUNTS | _NUMBERS | _OTHERS | {"dependentRequired", "$dynamicRef", "$recursiveRef"}


@dataclass(frozen=True)
class SchemaSupport:
    """The parts of JSON Schema that a backend enforces.

    Attributes:
        keywords: the keywords of `ASSERTIONS` that the backend enforces.
        formats: the values of `format` that the backend enforces.
        find_unenforced: a schema -> (keyword, problem) for its keywords that the backend does not enforce with their values.
    """

    keywords: frozenset[str]
    formats: frozenset[str] = frozenset()
    find_unenforced: Callable[[Mapping[str, Any]], list[tuple[str, str]]] = lambda _: []  # Any: JSON


def relax_schema(
    schema: object, support: SchemaSupport, parts: Sequence[SchemaPart] = (), where: str = "json"
) -> list[SchemaPlace]:
    """Remove from `schema`, in place, the keywords that `support` does not cover. The table at the top has the rules.

    Args:
        schema: JSON data; it is changed.
        parts: parts of `schema` with their own names, each strict or lenient. The rest of the schema is strict.
        where: the name of the rest of the schema, for messages.

    Returns:
        the places of the keywords that were left out and that could have rejected a value, for example
        "tools[0] ('f'): #/properties/a/uniqueItems", as `LeftOut` tells them.

    Raises:
        InvalidRequestError: a keyword is refused, or `schema` is no JSON schema. The message names the place in the same way.
    """
    return _Walk(schema, support, parts, where).run()


def subschemas(schema: object) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON
    """(JSON pointer, subschema) for every subschema that `relax_schema` reads, except `true` and `false`."""
    return _Walk(schema, SchemaSupport(frozenset()), (), "").nodes()


def name_place(path: str, parts: Sequence[SchemaPart], where: str) -> SchemaPlace:
    """The place with this path. `where`: the name of the whole schema, for a place that is in none of the parts."""
    part = find_part(path, parts)
    if part is None:
        return SchemaPlace("structured_outputs", f"{where}: {path}")
    return SchemaPlace(part.param, f"{part.name}: #{path.removeprefix(part.pointer)}")


def find_part(path: str, parts: Sequence[SchemaPart]) -> SchemaPart | None:
    return next((part for part in parts if f"{path}/".startswith(f"{part.pointer}/")), None)


# How many `properties` and `patternProperties` one object has: in its schema, in the schemas of `allOf`, and in the target of
# `$ref`.
_Counts = Counter[str]


class _Walk:
    def __init__(self, schema: object, support: SchemaSupport, parts: Sequence[SchemaPart], where: str) -> None:
        self._root = schema
        self._support = support
        self._parts = parts
        self._where = where
        self._seen: set[str] = set()  # targets of $ref that were, or will be, walked
        self._left_out = LeftOut()

    def run(self) -> list[SchemaPlace]:
        # `nodes` is a generator: it looks for the children of a node after the body of this loop has changed the node
        for path, node in self.nodes():
            part = find_part(path, self._parts)
            self._relax(node, path, part)
            self._check_keywords(node, path)
        return self._left_out.places()

    def nodes(self) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON
        stack: list[tuple[object, str, int, _Counts]] = [(self._root, "#", 0, _Counts())]
        num_nodes = 0
        while stack:
            node, path, depth, counts = stack.pop()
            num_nodes += 1
            if num_nodes > MAX_NODES:
                raise self._refusal(path, f"is the schema's {num_nodes}th subschema; at most {MAX_NODES} are allowed")
            if len(path) > MAX_PATH_CHARACTERS:
                raise self._refusal(f"{path[:100]}...", f"has a path of more than {MAX_PATH_CHARACTERS} characters")
            if depth > MAX_DEPTH:
                raise self._refusal(path, f"is nested more than {MAX_DEPTH} deep")
            if isinstance(node, bool):
                continue
            if not isinstance(node, dict):
                raise self._refusal(path, f"is {_name(node)}, not a schema (an object, true or false)")
            yield path, node
            for child, child_path in self._children(node, path):
                is_same_object = child_path.startswith(f"{path}/allOf/") or child_path == node.get("$ref")
                stack.append((child, child_path, depth + 1, counts if is_same_object else _Counts()))
            self._count_properties(node, path, counts)

    def _count_properties(self, node: Mapping[str, Any], path: str, counts: _Counts) -> None:  # Any: JSON
        for keyword, limit in (("properties", MAX_PROPERTIES), ("patternProperties", MAX_PATTERN_PROPERTIES)):
            counts[keyword] += len(node.get(keyword, ()))
            if keyword in node and counts[keyword] > limit:
                problem = f"gives one object {counts[keyword]} {keyword}; at most {limit} are allowed"
                raise self._refusal(f"{path}/{keyword}", f"{problem}: split it into several objects")

    def _relax(self, node: dict[str, Any], path: str, part: SchemaPart | None) -> None:  # Any: JSON
        is_strict = part is None or part.is_strict
        _leave_out_nulls(node)
        _modernize(node)
        if part is not None and part.takes_malformed:
            self._leave_out_malformed(node, path)
        # a backend may be unable to prove that the branches of a oneOf do not overlap, so oneOf becomes anyOf
        if not is_strict and "oneOf" in node and "anyOf" not in node:
            node["anyOf"] = node.pop("oneOf")
            if isinstance(node["anyOf"], list) and not _exclude_each_other(node["anyOf"]):
                self._tell(f"{path}/oneOf")
        for keyword in [keyword for keyword in node if keyword in ASSERTIONS]:
            if keyword not in node:
                continue
            if _asserts_nothing(keyword, node[keyword]):
                del node[keyword]
            elif self._is_unknown_format(keyword, node[keyword]) or (
                keyword not in self._support.keywords and (keyword == "uniqueItems" or not is_strict)
            ):
                self._leave_out_with_dependents(node, keyword, path)
        if is_strict:
            return
        if _is_foreign(node.get("$ref")):
            self._leave_out(node, "$ref", path)
        for keyword, _ in self._support.find_unenforced(node):
            self._leave_out_with_dependents(node, keyword, path)

    def _leave_out_malformed(self, node: dict[str, Any], path: str) -> None:  # Any: JSON
        """Leave out what the standard does not allow. In a list or an object of schemas, what is no schema becomes `true`."""
        for keyword in [keyword for keyword in node if keyword in ASSERTIONS or keyword == _OPTIONS]:
            if keyword not in node:  # it was left out with another one
                continue
            value = node[keyword]
            if keyword == _OPTIONS or _problem(keyword, value) or not self._holds_schemas(keyword, value):
                self._leave_out_with_dependents(node, keyword, path)
            elif keyword in _SCHEMA_MAPS:
                node[keyword] = {
                    name: child if _is_schema(child) else self._anything(_child_path(path, keyword, name))
                    for name, child in value.items()
                }
            elif isinstance(value, list) and (keyword in _SCHEMA_LISTS or keyword == "items"):
                node[keyword] = [
                    child if _is_schema(child) else self._anything(_child_path(path, keyword, str(i)))
                    for i, child in enumerate(value)
                ]

    def _anything(self, path: str) -> bool:
        """A schema for any value, in place of what is left out at this path."""
        self._tell(path)
        return True

    def _holds_schemas(self, keyword: str, value: object) -> bool:
        """False if the keyword's value should be or have a schema and does not, or is a reference to nothing."""
        if keyword == "$ref" and isinstance(value, str) and not _is_foreign(value):
            try:
                return _is_schema(referred(self._root, value))
            except KeyError:
                return False
        if keyword in _SCHEMA_MAPS:
            return isinstance(value, Mapping)
        if keyword in _SCHEMA_LISTS:
            return isinstance(value, list)
        if keyword == "items":
            return _is_schema(value) or isinstance(value, list)
        return keyword not in _SCHEMA or _is_schema(value)

    def _leave_out_with_dependents(self, node: dict[str, Any], keyword: str, path: str) -> None:  # Any: JSON
        self._leave_out(node, keyword, path)
        if keyword in (
            "properties",
            "patternProperties",
        ):  # otherwise additionalProperties would forbid what they admit
            self._leave_out(node, "additionalProperties", path)

    def _leave_out(self, node: dict[str, Any], keyword: str, path: str) -> None:  # Any: JSON
        if keyword in node:
            del node[keyword]
            self._tell(f"{path}/{keyword}")

    def _tell(self, path: str) -> None:
        """Something was left out at this path."""
        self._left_out.add(name_place(path, self._parts, self._where))

    def _is_unknown_format(self, keyword: str, value: object) -> bool:
        return keyword == "format" and isinstance(value, str) and value not in self._support.formats

    def _check_keywords(self, node: Mapping[str, Any], path: str) -> None:  # Any: JSON
        for keyword in node:
            if keyword == _OPTIONS:
                raise self._refusal(f"{path}/{keyword}", "is not supported: use whitespace_pattern or leave it out")
            if keyword in ASSERTIONS:
                if keyword not in self._support.keywords:
                    part = find_part(path, self._parts)
                    hint = "" if part is None else "; leave it out, or set strict to false: then it is not enforced"
                    raise self._refusal(f"{path}/{keyword}", f"is not supported{hint}")
                problem = _problem(keyword, node[keyword])
                if problem := problem or dict(self._support.find_unenforced(node)).get(keyword, ""):
                    raise self._refusal(f"{path}/{keyword}", problem)

    def _children(self, node: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:  # Any: JSON
        for keyword, value in node.items():
            here = f"{path}/{keyword}"
            if keyword in _SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise self._refusal(here, f"is {_name(value)}, not a list of schemas")
                yield from ((child, f"{here}/{i}") for i, child in enumerate(value))
            elif keyword in _SCHEMA or keyword == "items":
                yield value, here
            elif keyword in _SCHEMA_MAPS:
                if not isinstance(value, Mapping):
                    raise self._refusal(here, f"is {_name(value)}, not an object of schemas")
                yield from ((child, _child_path(path, keyword, name)) for name, child in value.items())
            elif keyword == "$ref" and value not in self._seen:
                self._seen.add(value)
                yield self._resolve(value, here), value

    def _resolve(self, reference: str, path: str) -> object:
        """The subschema to which a reference such as "#/$defs/a" refers."""
        if reference != "#" and not reference.startswith("#/"):
            raise self._refusal(
                path, f"{reference!r} is not supported: a reference must be a path in the schema, #/..."
            )
        try:
            found: object = referred(self._root, reference)
        except KeyError:
            raise self._refusal(path, f"{reference!r} does not exist") from None
        return found

    def _refusal(self, path: str, problem: str) -> InvalidRequestError:
        return name_place(path, self._parts, self._where).refusal(f" {problem}")


def _exclude_each_other(branches: Sequence[object]) -> bool:
    """Whether it is plain that a value satisfies at most one of the branches: by their types, their values, or the value of one
    property that all of them must have."""
    nodes = [branch for branch in branches if isinstance(branch, Mapping)]
    if len(nodes) < len(branches):
        return False
    if _differ([_values(node) for node in nodes]) or _differ([_types(node) for node in nodes]):
        return True
    required = [_required_properties(node) for node in nodes]
    # only names that all nodes require can tell the branches apart, so the work is bounded by the length of the schema
    common = set.intersection(*map(set, required)) if required else ()
    return any(_differ([_values(properties[name]) for properties in required]) for name in common)


def _required_properties(node: Mapping[str, Any]) -> dict[str, object]:
    """The schemas of the properties that every object of `node` has."""
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return {}
    return {name: properties[name] for name in required if isinstance(name, str) and name in properties}


def _differ(sets: Sequence[set[str] | None]) -> bool:
    """Whether all sets are known and no two of them have a common element."""
    known = [each for each in sets if each is not None]
    num_values = len(set[str]().union(*known))
    return len(known) == len(sets) and sum(map(len, known)) == num_values


def _values(node: object) -> set[str] | None:
    """The JSON of the values that a schema lists with "const" or "enum"; None if it lists none."""
    if not isinstance(node, Mapping) or not ("const" in node or isinstance(node.get("enum"), list)):
        return None
    return {json.dumps(value) for value in ([node["const"]] if "const" in node else node["enum"])}


def _types(node: Mapping[str, Any]) -> set[str] | None:
    """The type of a schema, where an integer is a number; None if it does not have exactly one."""
    types = node.get("type")
    if not isinstance(types, str):
        return None
    return {"number" if types == "integer" else types}


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _child_path(path: str, keyword: str, name: str) -> str:
    return f"{path}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}"


def _leave_out_nulls(node: dict[str, Any]) -> None:  # Any: JSON
    for keyword in [keyword for keyword, value in node.items() if value is None and keyword in ASSERTIONS]:
        if keyword not in ("const", "type"):
            del node[keyword]


def _modernize(node: dict[str, Any]) -> None:  # Any: JSON
    """Bring older spellings into the one that the library reads: the flags of draft 4 and OpenAPI 3.0, counts like 2.0."""
    kinds = node.get("type")
    if node.get("nullable") is True and isinstance(kinds, str | list) and "null" not in kinds:
        node["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
        if isinstance(node.get("enum"), list) and None not in node["enum"]:
            node["enum"] = [*node["enum"], None]
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := node.get(keyword), bool):
            del node[keyword]
            if flag and bound in node:
                node[keyword] = node.pop(bound)
    for keyword in _COUNTS.intersection(node):
        if isinstance(value := node[keyword], float) and value.is_integer():
            node[keyword] = int(value)


def _asserts_nothing(keyword: str, value: object) -> bool:
    """Whether every value satisfies the keyword. The names of properties are always strings."""
    if keyword == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return keyword == "uniqueItems" and value is False


def _problem(keyword: str, value: object) -> str:
    """The problem with the value of a keyword, as the end of a sentence; "" if there is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in _COUNTS and not (is_number and isinstance(value, int) and 0 <= value <= MAX_COUNT):
        return f"is {_name(value)}, not an integer in [0, {MAX_COUNT}]"
    if keyword in _NUMBERS and not is_number:
        return f"is {_name(value)}, not a number"
    if keyword in ("pattern", "$ref") and not isinstance(value, str):
        return f"is {_name(value)}, not a string"
    if keyword == "type":
        for name in value if isinstance(value, list) and value else [value]:
            if not isinstance(name, str) or name not in TYPES:
                return f"{name!r} is none of {', '.join(sorted(TYPES))}"
    if keyword == "enum" and not (isinstance(value, list) and value):
        return "is not a list with at least one value, so no value could match it"
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return "is not a list of property names"
    return ""


def _is_foreign(reference: object) -> bool:
    """Whether this `$ref` refers to another document, or to an anchor."""
    return isinstance(reference, str) and reference != "#" and not reference.startswith("#/")


def _name(value: object) -> str:
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
