"""What models write beside JSON, and what it means: words without quotes, escapes of Python, and comments."""

import json
import re

_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LINE_COMMENT = re.compile(r"(?://|#)[^\r\n]*")
_COMMENT_BEFORE_END = re.compile(r"(?://|#)[^\r\n{}\[\](),:;\"']*(?=[\s}\])]*\Z)")
_ESCAPES = {**{char: f"\\{char}" for char in '"\\/bfnrt'}, "'": "'"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
KNOWN_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NO_STRINGS = re.compile(r"(?i:nan|inf(inity)?|undefined|nil)\b")
_BARE_VALUE = re.compile(r"[^\W\d_][^\\`=<>|]*")
_BARE_KEY = re.compile(r"[^\W\d][\w$-]*")


def escaped(text: str) -> str:
    """The text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def key_word(word: str) -> str | None:
    """The JSON of a key without quotes; None if it is none."""
    return f'"{escaped(word)}"' if _BARE_KEY.fullmatch(word) else None


def value_word(word: str, *, is_in_list: bool) -> str | None:
    """The JSON of a value without quotes; None if it is not certain what it means."""
    if word in KNOWN_WORDS:
        return KNOWN_WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if any(known.startswith(word) or word.startswith(known) for known in KNOWN_WORDS) or _NO_STRINGS.match(word):
        return None
    if not _BARE_VALUE.fullmatch(word) or (is_in_list and " " in word):
        return None
    return f'"{escaped(word)}"'


def translated_escape(escape: str) -> str | None:
    """The JSON of an escape; None if JSON has no such escape, so that the backslash itself should have been escaped."""
    kind = escape[1:2]
    if kind == "u" and len(escape) == 6:
        return escape
    if kind == "x" and len(escape) == 4:
        return f"\\u00{escape[2:]}"
    if kind == "U" and len(escape) == 10:
        code = int(escape[2:], 16)
        if code < 0x110000 and not 0xD800 <= code < 0xE000:
            return escaped(chr(code))
        return None
    return _ESCAPES.get(kind)


def find_comment(text: str, at: int, *, is_final: bool) -> re.Match[str] | None:
    """The comment that begins at this place; None if its end is not known. `is_final`: no more text will come."""
    if text.startswith("/*", at):
        return _BLOCK_COMMENT.match(text, at)
    if is_final and (found := _COMMENT_BEFORE_END.match(text, at)):  # only brackets follow, and they are no part of it
        return found
    found = _LINE_COMMENT.match(text, at)
    return None if found is None or found.end() == len(text) else found
