"""`to_json`: the JSON of answers and results, in which no character is a line break for any client.

A stream has one JSON text in each line. JSON escapes the control characters below U+0020, but not U+0085, U+2028 and U+2029.
Python's `str.splitlines`, and clients that read lines with httpx, take these three for line breaks, too. They would cut the
JSON in the middle. So they are escaped here, and JSON has the same value with the escapes.
"""

import json
from typing import Literal

from pydantic_core import to_json as _encode

_ESCAPES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def to_json(value: object, *, inf_nan_mode: Literal["null", "constants", "strings"] = "constants") -> bytes:
    """The JSON of `value`, in UTF-8 and in one line.

    Raises:
        PydanticSerializationError: `value` is no JSON, or has a lone surrogate.
    """
    return escape_line_breaks(_encode(value, inf_nan_mode=inf_nan_mode))


def row_to_json(value: object) -> bytes:
    """The JSON of a row of a file, with a blank behind commas and colons. A lone surrogate is escaped."""
    return escape_line_breaks(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def escape_line_breaks(text: bytes) -> bytes:
    """A JSON text with the escapes. `text` is UTF-8. Outside of strings JSON has none of the three characters."""
    if text.isascii():
        return text
    for character, escape in _ESCAPES:
        text = text.replace(character, escape)
    return text
