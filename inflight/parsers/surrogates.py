r"""Replaces lone surrogates in JSON by U+FFFD.

A character above U+FFFF is a pair of surrogates in UTF-16, and JSON may write it as two escapes, "\ud83d\ude42". Models, and
programs that cut strings in UTF-16, sometimes write only one half. That is no character: UTF-8 cannot encode it, and strict
readers of JSON refuse it. So each half without the other becomes U+FFFD, as in JavaScript's `toWellFormed`.
"""

import re

REPLACEMENT = "\\ufffd"  # the escape of U+FFFD, for a half that was an escape
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# the other escapes are matched, too, because "\\ud83d" is a backslash and five plain characters
_ESCAPES = re.compile(rf"{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.", re.DOTALL)
# an escape at the end of a text, to which the next piece of the text may add the other half or the rest
_OPEN = rf"(?:{_HIGH})?\\(?:u(?:[dD](?:[89a-fA-F][0-9a-fA-F]?)?)?)?\Z|{_HIGH}\Z"
_OPEN_OR_ESCAPES = re.compile(rf"(?P<open>{_OPEN})|{_ESCAPES.pattern}", re.DOTALL)
_RAW = re.compile("[\ud800-\udfff]")


def without_lone_surrogates(text: str) -> str:
    """A JSON text, or a part of one that does not begin within an escape, with U+FFFD for each lone surrogate."""
    if "\\u" in text:
        text = _ESCAPES.sub(lambda found: REPLACEMENT if found[1] else found[0], text)
    return _RAW.sub("\N{REPLACEMENT CHARACTER}", text)


class SurrogateFilter:
    """Does the same with a JSON text that comes piece by piece. It holds at most eleven characters back, which may become an
    escape."""

    def __init__(self) -> None:
        self._held = ""

    def write(self, text: str) -> str:
        """Add a piece. Returns the text that is certain now."""
        if not self._held and "\\" not in text:
            return _RAW.sub("\N{REPLACEMENT CHARACTER}", text)
        text = self._held + text
        self._held = ""
        return _RAW.sub("\N{REPLACEMENT CHARACTER}", _OPEN_OR_ESCAPES.sub(self._replace, text))

    def finish(self) -> str:
        """The text has ended. Returns what was held back."""
        held = self._held
        self._held = ""
        return without_lone_surrogates(held)

    def _replace(self, found: re.Match[str]) -> str:
        if found["open"]:
            self._held = found[0]
            return ""
        return REPLACEMENT if found[2] else found[0]
