"""Finds values of a JSON schema that must match many patterns at once, by way of `allOf` and `$ref`.

The grammar library intersects such patterns. Its time is exponential in their number, without a limit, and in a thread that
cannot be ended: 10 patterns may need 0.1 s, 14 patterns 5 s, and 30 patterns hours.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.structured_output.json_schema import find_part, name_place, subschemas
from inflight.structured_output.left_out import LeftOut
from inflight.structured_output.spec import SchemaPart, SchemaPlace

MAX_MERGED_PATTERNS = 8
MAX_VISITS = 200_000  # of subschemas; more only if very many of them describe the same values

_Nodes = Mapping[str, Mapping[str, Any]]  # JSON pointer -> subschema


def leave_out_merged_patterns(schema: object, parts: Sequence[SchemaPart], where: str) -> list[SchemaPlace]:
    """If a value must match more than MAX_MERGED_PATTERNS patterns, remove these patterns, in place.

    Returns:
        the places of what was removed, as `relax_schema` does.

    Raises:
        InvalidRequestError: one of these patterns is in a strict part, or very many subschemas describe the same values.
    """
    nodes = dict(subschemas(schema))
    left_out = LeftOut()
    if sum("pattern" in node for node in nodes.values()) <= MAX_MERGED_PATTERNS:
        return []
    for group in _groups(nodes, where):
        with_pattern = [path for path in group if "pattern" in nodes[path]]
        for path in with_pattern if len(with_pattern) > MAX_MERGED_PATTERNS else ():
            place = name_place(f"{path}/pattern", parts, where)
            part = find_part(path, parts)
            if part is None or part.is_strict:
                raise place.refusal(
                    f": {len(with_pattern)} patterns meet in one value; at most {MAX_MERGED_PATTERNS} are allowed: "
                    "write one pattern"
                )
            del nodes[path]["pattern"]
            left_out.add(place)
    return left_out.places()


def _groups(nodes: _Nodes, where: str) -> Iterable[frozenset[str]]:
    """Sets of subschemas that describe the same value, each with at least two."""
    found: dict[frozenset[str], None] = {}
    stack = [group for path in nodes if len(group := _same_value([path], nodes)) > 1]
    num_visits = 0
    while stack:
        group = stack.pop()
        if group in found:
            continue
        found[group] = None
        children = _children(group, nodes)
        num_visits += len(group) + sum(map(len, children))
        if num_visits > MAX_VISITS:
            raise InvalidRequestError(
                f"{where}: too many subschemas describe the same values: simplify the schema", "structured_outputs"
            )
        stack += [inner for each in children if len(inner := _same_value(each, nodes)) > 1]
    return found


def _same_value(paths: Iterable[str], nodes: _Nodes) -> frozenset[str]:
    """The subschemas with these paths, and those that a value of them must satisfy, too."""
    found: set[str] = set()
    stack = [path for path in paths if path in nodes]
    while stack:
        path = stack.pop()
        if path in found:
            continue
        found.add(path)
        node = nodes[path]
        more = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = node.get(keyword)
            if isinstance(branches, list) and (keyword == "allOf" or len(branches) == 1):
                more += [f"{path}/{keyword}/{i}" for i in range(len(branches))]
        stack += [each for each in more if each in nodes]
    return frozenset(found)


def _children(group: Iterable[str], nodes: _Nodes) -> list[list[str]]:
    """The subschemas of the same property, or of the same item, of a value that all of `group` describe. What stands for any
    property or any item may describe each of them."""
    properties: defaultdict[str, list[str]] = defaultdict(list)
    items: defaultdict[int, list[str]] = defaultdict(list)
    any_property: list[str] = []
    any_item: list[str] = []
    for path in group:
        node = nodes[path]
        for name in node.get("properties", ()):
            properties[name].append(f"{path}/properties/{_escaped(name)}")
        any_property += [f"{path}/patternProperties/{_escaped(name)}" for name in node.get("patternProperties", ())]
        for i in range(len(node.get("prefixItems", ()))):
            items[i].append(f"{path}/prefixItems/{i}")
        any_property.append(f"{path}/additionalProperties")
        any_item += [f"{path}/{keyword}" for keyword in ("items", "additionalItems")]
    any_property = [path for path in any_property if path in nodes]
    any_item = [path for path in any_item if path in nodes]
    children = [*([*each, *any_property] for each in properties.values()), any_property]
    children += [*([*each, *any_item] for each in items.values()), any_item]
    return [each for each in children if len(each) > 1]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
