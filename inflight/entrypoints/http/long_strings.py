"""`take_long_strings`: takes long strings, such as images in base64, out of JSON before it is parsed.

Python's parser holds the GIL for a whole string, which for 16 MB takes 20 ms. All streams of the server would wait. So a short
name stands for each long string of plain characters while the rest is parsed. They are found and checked in pieces. Between two
pieces other threads get the GIL.
"""

import secrets
import time
from collections.abc import Iterator

LONG = 2**16  # bytes; shorter strings stay in the JSON
_PIECE = 2**18  # bytes that are searched at a time
# What long strings may consist of: base64 and the beginnings of data: URLs. These characters have no meaning in JSON's strings.
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=:;,._-"

Buffer = bytes | bytearray


def give_way() -> None:
    """Let another thread have the GIL. A thread that waits for it asks only after 5 ms."""
    time.sleep(0)


def take_long_strings(body: Buffer) -> tuple[Buffer, dict[str, str]]:
    """Returns the JSON in which names stand for long strings, and the strings by their names. If `put_back` does not find each
    name as a value, something else was taken out, such as a key or a part of a text. Then the body must be parsed as it is."""
    name = secrets.token_hex(16)
    strings: dict[str, str] = {}
    pieces: list[Buffer] = []
    done = 0
    for start, end in _long_strings(body):
        key = f"{name}{len(strings)}"
        strings[key] = str(memoryview(body)[start:end], "ascii")
        give_way()
        pieces += [body[done:start], key.encode()]
        done = end
    return (b"".join([*pieces, body[done:]]) if strings else body), strings


def put_back(value: object, strings: dict[str, str]) -> object:
    """Returns the string for which `value` stands, and removes it from `strings`; otherwise the value. In a list, its values
    are replaced."""
    if isinstance(value, str):
        return strings.pop(value, value)
    if isinstance(value, list):
        value[:] = [strings.pop(each, each) if isinstance(each, str) else each for each in value]
    return value


def _long_strings(body: Buffer) -> Iterator[tuple[int, int]]:
    """Where long strings of plain characters begin and end."""
    first = 0
    at = LONG
    while at < len(body):
        if body.find(b'"', at - LONG, at) >= 0:
            at += LONG
            continue
        start = body.rfind(b'"', first, at - LONG) + 1
        end = _next_quote(body, at)
        if end < 0:
            return
        if start and all(_is_plain(body[i : min(i + _PIECE, end)]) for i in range(start, end, _PIECE)):
            yield start, end
        first = end + 1
        at = first + LONG


def _next_quote(body: Buffer, start: int) -> int:
    for at in range(start, len(body), _PIECE):
        if (found := body.find(b'"', at, at + _PIECE)) >= 0:
            return found
    return -1


def _is_plain(piece: Buffer) -> bool:
    give_way()
    return not piece.translate(None, _PLAIN)
