"""`to_json`: the JSON of answers and results, in which no character is a line break for any client.

A stream has one JSON text in each line. JSON escapes the control characters below U+0020, but not U+0085, U+2028 and U+2029.
Python's `str.splitlines`, and clients that read lines with httpx, take these three for line breaks, too. They would cut the
JSON in the middle. So they are escaped here, and JSON has the same value with the escapes.
"""

import json
from typing import Literal

from pydantic_core import to_json as _encode

_NEXT_LINE, _LINE_SEPARATOR, _PARAGRAPH_SEPARATOR = b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9"  # in UTF-8


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
    # a search for one byte is much faster than one for several, and most texts have neither of these bytes
    if _NEXT_LINE[0] in text:
        text = text.replace(_NEXT_LINE, b"\\u0085")
    if _LINE_SEPARATOR[0] in text:
        text = text.replace(_LINE_SEPARATOR, b"\\u2028").replace(_PARAGRAPH_SEPARATOR, b"\\u2029")
    return text
