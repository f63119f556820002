"""Finds the parts of a JSON schema that a grammar library refuses, by trying them. Not all that a library lacks can be known
from keywords: it may refuse one pattern and take another, or two keywords only together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from inflight.structured_output.json_schema import ASSERTIONS, WITH_SCHEMAS, find_part, name_place, subschemas
from inflight.structured_output.spec import SchemaPart, SchemaPlace

Refuses = Callable[[object], str]  # a schema -> why the library refuses it, or ""

MAX_FOUND = 32  # keywords of a schema that are looked for one by one; after these, whole parts are left out
MAX_TRIED_CHARACTERS = 2_000_000  # of all schemas that are tried for one keyword, so that a trial ends within a second


# Any: JSON
def leave_out_refused(
    schema: dict[str, Any], refuses: Refuses, parts: Sequence[SchemaPart], where: str
) -> list[SchemaPlace]:
    """Remove from the lenient parts of `schema`, in place, what the library refuses. If no single keyword is the cause, a whole
    part is removed. What the library refuses in a strict part stays.

    Returns:
        the places of what was removed, as `relax_schema` does.
    """
    lenient = [part for part in parts if not part.is_strict]
    left_out: list[SchemaPlace] = []
    while lenient and (error := refuses(schema)):
        path, node, keyword = find_refused(schema, refuses, error) if len(left_out) < MAX_FOUND else ("", None, "")
        part = None if node is None else find_part(path, parts)
        if part is not None and part.is_strict:
            break
        if node is not None and part is not None:
            del node[keyword]
            left_out.append(name_place(f"{path}/{keyword}", parts, where))
            if keyword == "patternProperties" and node.pop("additionalProperties", None) is not None:
                left_out.append(name_place(f"{path}/additionalProperties", parts, where))
        elif not (part := _leave_out_part(schema, refuses, error, lenient)):
            break
        else:
            lenient.remove(part)
            left_out.append(name_place(part.pointer, parts, where))
    return left_out


# Any: JSON
def find_refused(schema: dict[str, Any], refuses: Refuses, error: str) -> tuple[str, dict[str, Any] | None, str]:
    """(path, node, keyword) of the keyword without which the library has another error or none; node is None if there is none
    such keyword. If the keyword holds schemas, a cause inside of these is looked for, too."""
    found: tuple[str, dict[str, Any] | None, str] = ("", None, "")
    inside = ""
    tried = (
        (path, node, keyword)
        for path, node in subschemas(schema)
        for keyword in list(node)
        if f"{path}/".startswith(inside) and keyword in ASSERTIONS and keyword not in ("type", "properties")
    )
    for path, node, keyword in islice(tried, MAX_TRIED_CHARACTERS // (1 + len(json.dumps(schema)))):
        before = dict(node)
        del node[keyword]
        is_cause = refuses(schema) != error
        node.clear()
        node.update(before)  # in the same order: the order of properties is that of the text
        if is_cause:
            found = (path, node, keyword)
            inside = f"{path}/{keyword}/"
            if keyword not in WITH_SCHEMAS:
                break
    return found


def _leave_out_part(
    schema: dict[str, Any], refuses: Refuses, error: str, parts: Sequence[SchemaPart]
) -> SchemaPart | None:  # Any: JSON
    """Empties the first part without which the library has another error or none. Returns the part."""
    nodes = dict(subschemas(schema))
    for part in [part for part in parts if part.pointer in nodes]:
        node = nodes[part.pointer]
        before = dict(node)
        node.clear()
        node.update({"type": before["type"]} if isinstance(before.get("type"), str) else {})
        if refuses(schema) != error:
            return part
        node.clear()
        node.update(before)
    return None


def never_ends(schema: object) -> bool:
    """Whether every value of the schema would have to contain another value of it, and so on without an end."""
    nodes = dict(subschemas(schema))
    ending: set[str] = set()
    while True:
        more = {path for path, node in nodes.items() if path not in ending and _ends(node, path, nodes, ending)}
        if not more:
            return "#" in nodes and "#" not in ending
        ending |= more


def _ends(node: Mapping[str, Any], path: str, nodes: Mapping[str, Any], ending: set[str]) -> bool:  # Any: JSON
    """Whether a value of `node` is certain to exist, given the paths of nodes for which this is known."""

    def ends(child: str) -> bool:
        return child not in nodes or child in ending  # what is no node is `true`, `false` or missing

    if "$ref" in node and not ends(node["$ref"]):
        return False
    parts = range(len(node.get("allOf", ())))
    if not all(ends(f"{path}/allOf/{i}") for i in parts):
        return False
    for keyword in ("anyOf", "oneOf"):
        choices = range(len(node.get(keyword) or ()))
        if choices and not any(ends(f"{path}/{keyword}/{i}") for i in choices):
            return False
    if "enum" in node or "const" in node:
        return True
    types = node.get("type", "string")
    types = types if isinstance(types, list) else [types]
    if set(types) - {"object", "array"}:
        return True
    escaped = [name.replace("~", "~0").replace("/", "~1") for name in node.get("required", ())]
    object_ends = "object" in types and all(ends(f"{path}/properties/{name}") for name in escaped)
    array_ends = "array" in types and (
        not node.get("minItems") or (ends(f"{path}/items") and ends(f"{path}/prefixItems/0"))
    )
    return object_ends or array_ends
