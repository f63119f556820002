"""References of a schema to its own parts: each form that JSON Schema has for them, as a path from the root."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.structured_output.references import referred, with_local_references

URL, URN = "https://a.example/s/root", "urn:example:root"


def local(reference: str, root: dict[str, Any] | None = None, **part: Any) -> str:
    """The local form of `reference`. It stands in the property "p" beside `part`, and the schema has the definitions "d" and
    "e/ f"."""
    schema = {
        **(root or {}),
        "$defs": {
            "d": {"$anchor": "an", "items": {"type": "null"}},
            "e/ f": {"$id": "inner", "not": {"$anchor": "an"}},
        },
        "properties": {"p": {**part, "not": {"$ref": reference}}},
    }
    given = repr(schema)
    changed = with_local_references(schema)
    assert repr(schema) == given
    assert "$id" not in repr(changed) and "$anchor" not in repr(changed)
    found: str = changed["properties"]["p"]["not"]["$ref"]
    return found


@pytest.mark.parametrize("root", [{}, {"$id": URL}, {"$id": f"{URL}#"}, {"$id": URN}])
@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("#", "#"),
        ("", "#"),
        ("#/$defs/d", "#/$defs/d"),
        ("#/$defs/d/items", "#/$defs/d/items"),
        ("#/$defs/e~1%20f", "#/$defs/e~1%20f"),
        ("#/$defs/e~1 f", "#/$defs/e~1%20f"),
        ("#an", "#/$defs/d"),
        ("#none", "#none"),
    ],
)
def test_a_reference_within_a_resource(root: dict[str, Any], reference: str, path: str) -> None:
    assert local(reference, root) == path


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        (URL, "#"),
        ("root#/$defs/d", "#/$defs/d"),
        ("/s/root#an", "#/$defs/d"),
        ("inner", "#/$defs/e~1%20f"),
        ("inner#", "#/$defs/e~1%20f"),
        ("inner#/not", "#/$defs/e~1%20f/not"),
        ("https://a.example/s/inner#an", "#/$defs/e~1%20f/not"),
        ("https://b.example/x", "https://b.example/x"),
        ("other#/not", "other#/not"),
    ],
)
def test_a_reference_to_a_resource(reference: str, path: str) -> None:
    assert local(reference, {"$id": URL}) == path


def test_a_reference_is_relative_to_the_nearest_id() -> None:
    assert local("#", {"$id": URL}, **{"$id": "own"}) == "#/properties/p"
    assert local("#/not", {"$id": URL}, **{"$id": "own"}) == "#/properties/p/not"
    assert local("root", {"$id": URL}, **{"$id": "own"}) == "#"
    assert local("#an", {"$id": URL}, **{"$id": "own"}) == "#an", "its anchors are its own"
    for reference in ("", "#"):
        assert local(reference, {"$id": URL}, **{"$id": URN}) == "#/properties/p"


def test_what_is_no_uri_or_too_long_means_nothing() -> None:
    assert local("http://[", {"$id": URL}) == "http://["
    assert local("#/not", {"$id": "http://["}) == "#/not"
    long = f"{URL}{'a/' * 2000}"
    assert local(f"{long}#/not", {"$id": long}) == f"{long}#/not"
    assert local("#/not", {"$id": long}) == "#/not"


def test_values_are_no_schemas() -> None:
    schema = {"const": {"$ref": "#a"}, "enum": [{"$id": "x"}], "items": {"$anchor": "a"}}
    assert with_local_references(schema) is schema
    assert with_local_references({**schema, "not": {"$ref": "#a"}}) == {
        "const": {"$ref": "#a"},
        "enum": [{"$id": "x"}],
        "items": {},
        "not": {"$ref": "#/items"},
    }


def test_the_part_that_a_reference_names() -> None:
    schema = {"$defs": {"a/b c~1": {"anyOf": [{"type": "null"}] * 13}}}
    assert referred(schema, "#") is schema
    assert referred(schema, "#/$defs/a~1b%20c~01/anyOf/12") == {"type": "null"}
    for nowhere in ("#/$defs/b", "#a", "", "http://x.y", "#/$defs/a~1b%20c~01/anyOf/13", f"#/$defs/{'9' * 5000}"):
        with pytest.raises(KeyError):
            referred(schema, nowhere)
    for index in ("a", "-1", "9" * 5000):
        with pytest.raises(KeyError):
            referred(schema, f"#/$defs/a~1b%20c~01/anyOf/{index}")


def test_what_is_below_a_very_long_name_is_not_looked_at() -> None:
    schema = {"properties": {"a" * 5000: {"$ref": "#b"}, "x": {"$ref": "#b"}}, "$defs": {"b": {"$anchor": "b"}}}
    found = with_local_references(schema)
    assert found["properties"] == {"a" * 5000: {"$ref": "#b"}, "x": {"$ref": "#/$defs/b"}}
