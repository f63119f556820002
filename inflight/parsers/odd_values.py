"""What makes a reading of damaged JSON doubtful: values that a model hardly writes, and that come from a sign at the wrong
place.

Damage may have more parts than a repair tries. Then the only reading with one edit may be another value than the model meant.
Such readings often have brackets, commas or comments in keys and strings.
"""

import json
import re
from collections.abc import Iterator

_TYPOGRAPHIC_QUOTES = "“”„"
_ODD_IN_KEY = re.compile(r"[,:{}\[\]\n]|//|/\*|\*/|#")
_SIGNS = tuple(",:{}[]")
_NUM_AT_EDGE = 8  # characters of a text that are compared beside its quotes
_TORN = re.compile(r"(\w),?[}\])]\Z")


def has_odd_key(value: object) -> bool:
    """Whether a key contains a bracket, colon, comma or comment, so that a quote is probably at the wrong place."""
    return any(_ODD_IN_KEY.search(text) for text, is_key in _texts(value) if is_key)


def has_odd_quote(value: object) -> bool:
    """Whether one of two typographic quotes is missing in a text. Then the model may have written the other one instead of
    `"`."""
    return any(sum(map(text.count, _TYPOGRAPHIC_QUOTES)) % 2 for text, _ in _texts(value))


def has_odd_string(value: object, damaged: str) -> bool:
    """Whether a text has got a quote from the repair that begins with a sign of JSON, or is a key with white space; or whether
    several words have got both their quotes from it.

    Args:
        damaged: what the model has written.
    """
    for text, is_key in _texts(value):
        has_words = len(text.split()) > 1
        is_odd = text.lstrip().startswith(_SIGNS) or (is_key and (has_words or text != text.strip()))
        if (is_odd or has_words) and not _is_quoted(text, damaged, needs_both=is_odd):
            return True
    return False


def _is_quoted(text: str, damaged: str, *, needs_both: bool) -> bool:
    """Whether a text stands between quotes, or without `needs_both` at least beside one."""
    forms = (text, *(json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    written = [(form, quote) for form in forms for quote in "\"'"]
    if needs_both:
        return any(f"{quote}{form}{quote}" in damaged for form, quote in written)
    edges = (edge for form, quote in written for edge in (quote + form[:_NUM_AT_EDGE], form[-_NUM_AT_EDGE:] + quote))
    return any(edge in damaged for edge in edges)


def lacks_bracket(text: str, bracket: str) -> bool:
    """Whether a text has fewer brackets of this kind than of the opposite kind."""
    pair = next((pair for pair in ("{}", "[]", "()") if bracket in pair), "")
    return bool(pair) and text.count(bracket) < text.count(pair.replace(bracket, ""))


def is_torn(before: str, behind: str) -> bool:
    """Whether a closing bracket may stand in the middle of a number or a word, as in `17}3`. `before`: a text that ends with
    the bracket. `behind`: the next character."""
    found = _TORN.search(before, max(len(before) - 3, 0))
    return found is not None and (
        (found[1].isdigit() and behind.isdigit()) or (found[1].isalpha() and behind.isalpha())
    )


def _texts(value: object) -> Iterator[tuple[str, bool]]:
    """All texts in a value of JSON, and whether they are keys."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key, True
            yield from _texts(each)
