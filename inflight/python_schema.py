"""Makes a JSON schema from a Python type: a pydantic model, a dataclass, a TypedDict, an Enum, `list[Model]`."""

from typing import cast, get_origin

from inflight.errors import InvalidRequestError


def is_python_type(value: object) -> bool:
    """Whether `value` is a class, or a type with arguments such as `list[Model]` or `Model | None`."""
    return isinstance(value, type) or get_origin(value) is not None


def json_schema_of(kind: object) -> object:
    """Returns the JSON schema that pydantic makes for the type.

    A class with the method `model_json_schema` (pydantic 2) makes its own schema, and so does a model class of pydantic 1. For
    all other types pydantic is imported.

    Raises:
        InvalidRequestError: pydantic is not installed, or it has no schema for this type.
    """
    name = getattr(kind, "__name__", str(kind))
    try:
        if isinstance(kind, type):
            if make := getattr(kind, "model_json_schema", None):
                return make()
            if "__fields__" in vars(kind) and (make := getattr(kind, "schema", None)):  # pydantic 1
                return make()
        from pydantic import TypeAdapter  # an optional dependency of this file

        adapter: TypeAdapter[object] = TypeAdapter(cast("type", kind))
        return adapter.json_schema()
    except Exception as error:  # pydantic has many classes of errors; a model class may also have code of its own
        first_line = str(error).partition("\n")[0]
        raise InvalidRequestError(
            f"no JSON schema can be made for the type {name}: {first_line}; give the JSON schema as a dictionary"
        ) from error
