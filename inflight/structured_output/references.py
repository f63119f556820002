"""Brings the references of a JSON schema into one form: "#/path/in/the/schema"."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

_DATA = frozenset({"const", "enum", "default", "examples"})  # these keywords hold values, not schemas
_MAX_BASE = 2000  # characters of a "$id"; each reference is joined to it
# Of the path of a subschema. Each subschema below repeats it, so a name of a megabyte would need gigabytes of memory.
MAX_PATH_CHARACTERS = 2048


def with_local_references(schema: Any) -> Any:  # Any: JSON
    """Returns the schema with each "$ref" to a part of it as a path from its root. A reference may name the part by its "$id"
    or "$anchor", or by a path from the nearest "$id". Other references stay as they are. The schema itself is not changed."""
    found = list(_subschemas(schema, "#", ""))
    if not any(isinstance(node.get("$ref"), str) for node, _, _ in found):
        return schema
    places: dict[str, str] = {}
    for node, path, base in found:
        if path == "#" or isinstance(node.get("$id"), str):
            places.setdefault(base, path)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(keyword), str):
                places.setdefault(f"{base}#{node[keyword]}", path)
    copy = json.loads(json.dumps(schema))
    for node, _, base in _subschemas(copy, "#", ""):
        reference = node.get("$ref")
        if isinstance(reference, str) and (local := _localize(reference, base, places)) is not None:
            node["$ref"] = local
    for node, _, _ in list(_subschemas(copy, "#", "")):
        for keyword in ("$id", "$anchor", "$dynamicAnchor"):
            if isinstance(node.get(keyword), str):
                del node[keyword]
    return copy


def referred(root: Any, reference: str) -> Any:  # Any: JSON
    """The part of the schema `root` to which a reference such as "#/$defs/a~1b%20c" refers; "#" is the whole schema.

    Raises:
        KeyError: there is no such part.
    """
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        raise KeyError(reference)
    node = root
    for part in reference[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and _is_index(key) and int(key) < len(node):
            node = node[int(key)]
        else:
            raise KeyError(reference)
    return node


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < 10  # Python refuses to read very long numbers


def moved(node: Any, root: str) -> Any:  # Any: JSON
    """Put `root` before each "$ref" to a place in the same schema. Data under "const" and "enum" is not changed."""
    if isinstance(node, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else value
            if key in ("const", "enum")
            else moved(value, root)
            for key, value in node.items()
        }
    if not isinstance(node, list):
        return node
    return [moved(item, root) for item in node]


def _localize(reference: str, base: str, places: Mapping[str, str]) -> str | None:
    """The path from the root, or None if the reference does not refer to a part of the schema."""
    try:
        # `urljoin` cannot join a fragment to a URN
        whole = f"{base}{reference}" if reference.startswith("#") else urljoin(base, reference)
        resource, fragment = urldefrag(whole)
    except ValueError:  # it is no URI
        return None
    if whole in places:
        return places[whole]
    root = places.get(resource)
    if root is None or (fragment and not fragment.startswith("/")):
        return None
    # one spelling, as the library needs it
    parts = (quote(unquote(part), safe="~$") for part in fragment.split("/")[1:])
    return root + "".join(f"/{part}" for part in parts)


def _base(base: str, own: str) -> str:
    """The URI that references are relative to in a schema with this "$id". One that is no URI, or too long, means nothing."""
    try:
        joined = urldefrag(urljoin(base, own)).url if len(own) <= _MAX_BASE else base
    except ValueError:
        return base
    return joined if len(joined) <= _MAX_BASE else base


def _subschemas(node: Any, path: str, base: str) -> Iterator[tuple[dict[str, Any], str, str]]:  # Any: JSON
    """(object, its path, the URI that references in it are relative to) for everything that may be a schema."""
    stack: list[tuple[Any, str, str]] = [(node, path, base)]
    while stack:
        node, path, base = stack.pop()
        if len(path) > MAX_PATH_CHARACTERS:
            continue
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str):
                base = _base(base, node["$id"])
            yield node, path, base
            for key, value in node.items():
                if key not in _DATA:
                    escaped = quote(key.replace("~", "~0").replace("/", "~1"), safe="~$")
                    stack.append((value, f"{path}/{escaped}", base))
        elif isinstance(node, list):
            stack.extend((item, f"{path}/{i}", base) for i, item in enumerate(node))
