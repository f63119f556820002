"""`StrictModel`: a JSON object of a request. `IgnoredFields`: removes unknown fields from a request, and reports them.

An unknown field is a field that no model of this package declares. It may belong to another engine, be newer than this server,
or be data that a client library adds. So the request is answered as if the field were not there. The log names each unknown
field once, and a header of the answer names the unknown fields of its request. If the setting `strict_fields` is set, a request
with unknown fields is refused.

The description of a field says what the field does. A field that does nothing is made with `no_effect`. A field that accepts
only the value that changes nothing is made with `neutral`. Both functions mark the field in the OpenAPI document.
docs/server-api.md and a test of all fields use these marks.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, get_args
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.whole_numbers import as_integers

logger = logging.getLogger(__name__)

EFFECT = "x-effect"  # in the OpenAPI document: "none" or "neutral". A field without this key changes the answer.
HEADER = "X-Ignored-Fields"
MAX_NAMES = 16  # per header
MAX_NAME_LENGTH = 100  # characters
MAX_LOGGED_NAMES = 1000  # clients choose the names, so the log and this memory need a bound
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~<>"  # characters that a header holds unchanged; all others are percent-encoded


def _read_integers(names: frozenset[str], value: Any) -> Any:  # Any: JSON, not checked yet
    """The object `value` with integers in its members `names`."""
    if not isinstance(value, dict):
        return value
    read = {name: as_integers(value[name]) for name in names.intersection(value)}
    return {**value, **read} if read else value


def _is_integer(annotation: object) -> bool:
    """Whether a field takes an integer or a list of integers, and no other numbers."""
    kinds = set(_kinds(annotation))
    return int in kinds and float not in kinds


def _kinds(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


class StrictModel(BaseModel):
    """Values are not converted to the declared type: a bool is not accepted as an integer, and "5" is not accepted as a number.
    NaN and infinity are not accepted either. If a field is None, the request has left it out, or has given null.

    The only exception: where an integer is expected, 12.0 and 1e3 are integers, too, as in JSON Schema. Many programs have one
    type for all numbers, and write 12.0."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # Any: pydantic's
        """Only a model with integers has a function that reads them: there may be thousands of messages without one."""
        schema = handler(source)
        fields = cls.model_fields.items()
        names = frozenset(field.alias or name for name, field in fields if _is_integer(field.annotation))
        read = partial(_read_integers, names)
        if not names:
            return schema
        return core_schema.no_info_before_validator_function(read, schema)


def optional(description: str, *, default: Any = None, **bounds: Any) -> Any:  # Any: as pydantic's own `Field`
    """A field that a request may leave out, unless `default` is `...`."""
    return Field(default, description=description, **bounds)


def no_effect(why: str, **bounds: Any) -> Any:
    """A field that is accepted and changes nothing. `why` is its description."""
    return optional(why, json_schema_extra={EFFECT: "none"}, **bounds)


def neutral(why: str, **bounds: Any) -> Any:
    """A field that accepts only the value that changes nothing, because the server does not support what other values ask for.
    `why` is the field's description."""
    return optional(why, json_schema_extra={EFFECT: "neutral"}, **bounds)


class IgnoredFields:
    """Removes and reports unknown fields. Each server has one object of this class, for the thread of its event loop. If
    `is_strict`, unknown fields are refused."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def take_out(self, body: StrictModel) -> list[str]:
        """Remove unknown fields from `body`, at every level. Returns the names of the removed fields that are not null, such as
        `messages[].parsed`.

        Raises:
            FieldError: an unknown field is not null, and unknown fields are refused.
        """
        found: dict[str, None] = {}
        for path, extra in _take_unknown(body, ""):
            for key in extra:
                if self._is_strict:
                    where = f"{path}{key}"
                    message = f"{where}: this field is not known here, and --strict-fields is set: leave it out"
                    raise FieldError(where, message)
                if len(found) > MAX_NAMES:
                    # `header` shows MAX_NAMES names. From one name more it sees that it must add "and more".
                    break
                found[without_indices(path) + key[:MAX_NAME_LENGTH]] = None
        return list(found)

    def header(self, names: Iterable[str]) -> dict[str, str]:
        """The header that names these fields, or {} if there are no names. Logs the names that were not logged before."""
        distinct = list(dict.fromkeys(names))
        if not distinct:
            return {}
        shown = [_plain(name) for name in distinct[:MAX_NAMES]]
        self._log(shown)
        return {HEADER: ", ".join([*shown, *(["and more"] if len(distinct) > MAX_NAMES else [])])}

    def _log(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.warning(
                    "a request has %s, which is ignored, because this server does not know it or cannot enforce it",
                    name,
                )


def without_indices(path: str) -> str:
    """messages[].content for messages[7].content: how the header names a place."""
    return _INDEX.sub("[]", path)


def _plain(name: str) -> str:
    """The name in a form that a header can contain. An empty name becomes two quotation marks."""
    if not name:
        return '""'
    return quote(name[:MAX_NAME_LENGTH], safe=_PLAIN, errors="replace")[:MAX_NAME_LENGTH]


def _take_unknown(value: object, path: str) -> Iterator[tuple[str, list[str]]]:
    """Remove the unknown fields of `value`, which is at `path` in the request. For each object that had unknown fields that are
    not null, yields a pair such as ("messages[0].", ["parsed"])."""
    if isinstance(value, StrictModel):
        dot = f"{path}." if path else ""
        if extra := value.__pydantic_extra__:
            names = [name for name, given in extra.items() if given is not None]
            extra.clear()
            if names:
                yield dot, names
        for name, child in value.__dict__.items():
            if isinstance(child, StrictModel | list):
                yield from _take_unknown(child, f"{dot}{name}")
    elif isinstance(value, list) and value and isinstance(value[0], StrictModel):
        for i, child in enumerate(value):
            yield from _take_unknown(child, f"{path}[{i}]")
