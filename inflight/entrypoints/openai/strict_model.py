"""`StrictModel`: a JSON object of a request. `IgnoredFields`: removes and reports fields that are not declared.

An unknown field may belong to another engine, be newer than this server, or be data that a client library adds. So the request
is answered as if the field were not there. The log names each such field once, and a header of the answer names the unknown
fields of its request. If `strict_fields` is set, such a request is refused.

The description of a field says what the field does. A field that does nothing is made with `no_effect`. If a
field accepts only the value that changes nothing, it is made with `neutral`. docs/server-api.md and the field test use
these marks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from inflight.entrypoints.openai.errors import FieldError

logger = logging.getLogger(__name__)

EFFECT = "x-effect"  # in the OpenAPI document: "none" or "neutral". A field without this key changes the answer.
HEADER = "X-Ignored-Fields"
MAX_NAMES = 16  # per header
MAX_NAME_LENGTH = 100  # characters
MAX_LOGGED_NAMES = 1000  # clients choose the names, so the log and this memory need a bound
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~<>"  # characters that a header holds unchanged; all others are percent-encoded


class StrictModel(BaseModel):
    """Each known field must have exactly its declared type. A bool is not accepted as an integer, and "5", NaN and infinity
    are not accepted as numbers. A field that is None was left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


def no_effect(why: str, **bounds: Any) -> Any:  # Any: as pydantic's own `Field`
    """A field that is accepted and changes nothing. `why` is its description."""
    return Field(description=why, json_schema_extra={EFFECT: "none"}, **bounds)


def neutral(why: str, **bounds: Any) -> Any:
    """A field that accepts only the neutral value, because the server does not do what other values ask for."""
    return Field(description=why, json_schema_extra={EFFECT: "neutral"}, **bounds)


class IgnoredFields:
    """A server has one of these. Only the event loop's thread uses it.

    Args:
        is_strict: refuse unknown fields.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def take_out(self, body: StrictModel) -> list[str]:
        """Remove unknown fields from `body`, at every level. Returns the names of the removed fields that are not null,
        such as `messages[].parsed`.

        Raises:
            FieldError: there are such fields, and the server is strict.
        """
        found: dict[str, None] = {}
        for path, extra in _take_unknown(body, ""):
            for key in extra:
                if self._is_strict:
                    where = f"{path}{key}"
                    message = f"{where}: this field is not known here, and --strict-fields is set: leave it out"
                    raise FieldError(where, message)
                if len(found) > MAX_NAMES:
                    # One name more than the header shows is enough: then the header ends with "and more".
                    break
                found[_INDEX.sub("[]", path) + key[:MAX_NAME_LENGTH]] = None
        return list(found)

    def header(self, names: Iterable[str]) -> dict[str, str]:
        """The header that names these fields; empty if there are none. Logs the fields that were not logged before."""
        distinct = list(dict.fromkeys(names))
        if not distinct:
            return {}
        shown = [_plain(name) for name in distinct[:MAX_NAMES]]
        self._log(shown)
        more = ["and more"] if len(distinct) > MAX_NAMES else []
        return {HEADER: ", ".join([*shown, *more])}

    def _log(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.warning("a request has %s, which is ignored: this server does not know or enforce it", name)


def _plain(name: str) -> str:
    """The name in a form that a header can contain. The empty name becomes two quotation marks."""
    return '""' if not name else quote(name[:MAX_NAME_LENGTH], safe=_PLAIN, errors="replace")[:MAX_NAME_LENGTH]


def _take_unknown(value: object, path: str) -> Iterator[tuple[str, list[str]]]:
    """Remove the unknown fields. Yields ("messages[0].", ["parsed"]) for each object that had any."""
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
