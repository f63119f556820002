"""Unknown fields of a request: they are removed and reported, or refused with `strict_fields`.

Such a field may belong to another engine, be newer than this server, or be data that a client library adds. So the request is
answered without it. The log names each such field once, and an answer's header names the unknown fields of its request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.model import StrictModel

logger = logging.getLogger(__name__)

HEADER = b"x-ignored-fields"
MAX_NAMES = 16  # of one header
MAX_NAME_LENGTH = 100  # characters
MAX_LOGGED_NAMES = 1000  # clients choose the names, so the log and this memory need a bound
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~<>"  # characters that a header holds unchanged; all others are percent-encoded


class IgnoredFields:
    """One per server; used by the event loop's thread only.

    Args:
        is_strict: refuse them.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def take_out(self, body: StrictModel) -> list[str]:
        """Remove unknown fields from `body`, at every level. Returns the names of those that are not null: `messages[].parsed`.

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
                if len(found) > MAX_NAMES:  # one name more than the header shows: then it ends with "and more"
                    break
                found[_INDEX.sub("[]", path) + key[:MAX_NAME_LENGTH]] = None
        return list(found)

    def header(self, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """The header that names these fields (none for no field). Logs the fields that were not logged before."""
        distinct = list(dict.fromkeys(names))
        if not distinct:
            return []
        shown = [_plain(name) for name in distinct[:MAX_NAMES]]
        self._log(shown)
        more = ["and more"] if len(distinct) > MAX_NAMES else []
        return [(HEADER, ", ".join([*shown, *more]).encode("ascii"))]

    def _log(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.warning("a request has %s, which is unknown here or cannot be enforced; it is ignored", name)


def _plain(name: str) -> str:
    """The name as a header can hold it; two quotation marks for the empty name."""
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
