"""JSON schemas of Python types. The truth is pydantic's own validation of texts that follow the schema."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pytest
from pydantic import BaseModel, TypeAdapter
from typing_extensions import TypedDict

from inflight import InvalidRequestError, StructuredOutputsParams
from inflight.python_schema import is_python_type, json_schema_of


class Place(BaseModel):
    name: str
    size: int = 3


class Tree(BaseModel):
    places: list[Place]
    below: Optional[Tree] = None  # noqa: UP045  # a name in a text has no `|`


@dataclasses.dataclass
class Point:
    x: int
    y: float


class Row(TypedDict):
    key: str


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    first: int
    second: str


class Older:
    """As a model class of pydantic 1."""

    __fields__ = {"a": int}  # noqa: RUF012

    @classmethod
    def schema(cls) -> dict[str, Any]:
        return {"type": "object", "title": "Older"}


TYPES: list[Any] = [
    Place,
    Tree,
    Point,
    Row,
    Color,
    Pair,
    list[Place],
    dict[str, Place],
    tuple[int, str],
    Place | Point,
    Place | None,
    Optional[Place],  # noqa: UP045
    Literal["a", "b"],
    Annotated[int, "text"],
    int,
    str,
    dict,
]


@pytest.mark.parametrize("kind", TYPES)
def test_the_schema_is_the_one_of_pydantic(kind: Any) -> None:
    assert is_python_type(kind)
    params = StructuredOutputsParams(json=kind)
    assert isinstance(params.json, str)
    assert json.loads(params.json) == TypeAdapter(kind).json_schema()


def test_a_model_class_makes_its_own_schema() -> None:
    assert json_schema_of(Older) == {"type": "object", "title": "Older"}
    assert json_schema_of(Place) == Place.model_json_schema()


@pytest.mark.parametrize("kind", [type("Plain", (), {}), list[type("Plain", (), {})], type(pytest)])  # type: ignore[misc]
def test_a_type_without_a_schema_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no JSON schema can be made for the type"):
        StructuredOutputsParams(json=kind)


@pytest.mark.parametrize("value", [5, True, [1], Place(name="a"), Color.RED, Place.model_json_schema, json])
def test_a_value_is_no_type(value: Any) -> None:
    assert not is_python_type(value)
    with pytest.raises(InvalidRequestError, match=r"^json is "):
        StructuredOutputsParams(json=value)
    if isinstance(value, Place):
        with pytest.raises(InvalidRequestError, match="give the class Place"):
            StructuredOutputsParams(json=value)
