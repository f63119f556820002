"""Fields of a request that are not known here. They are left out and told, or refused with `strict_fields`.

Such a field may be another engine's, or newer than this server, or data of the client's own that its library sends along. So
the request is answered without it. The log names each such field once, and the answer's header names those of its request.
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
MAX_LOGGED_NAMES = 1000  # clients choose the names: neither the log nor this memory may grow with them
_INDEX = re.compile(r"\[\d+\]")
_PLAIN = " !#$&'()*+-./:;=?@[]^_`{|}~<>"  # what stands in a header as it is; all else is percent-encoded


class IgnoredFields:
    """Of one server; used by the event loop's thread.

    Args:
        is_strict: refuse them.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def take_out(self, body: StrictModel) -> list[str]:
        """Leave them out of `body`, at every level; their names, as `messages[].parsed`. One that is null asks for nothing.

        Raises:
            FieldError: there are some, and the server is strict.
        """
        found: dict[str, None] = {}
        for path, extra in _take_unknown(body, ""):
            for key in extra:
                if self._is_strict:
                    where = f"{path}{key}"
                    message = f"{where}: this field is not known here, and --strict-fields refuses it: leave it out"
                    raise FieldError(where, message)
                if len(found) > MAX_NAMES:  # one more than is shown: it shows that there are more
                    break
                found[_INDEX.sub("[]", path) + key[:MAX_NAME_LENGTH]] = None
        return list(found)

    def header(self, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
        """The header that names them, or none; and the log's line for those that it has not named yet."""
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
                logger.warning("a request has %s, which is not known here, or not enforced, and is ignored", name)


def _plain(name: str) -> str:
    """As a header can carry it."""
    return quote(name[:MAX_NAME_LENGTH], safe=_PLAIN, errors="replace")[:MAX_NAME_LENGTH]


def _take_unknown(value: object, path: str) -> Iterator[tuple[str, list[str]]]:
    """("messages[0].", ["parsed"]) for each object that had some; they are taken out."""
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
