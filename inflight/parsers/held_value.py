"""`HeldValue`: an argument of a call that a model writes without quotes. It is held until it ends, and becomes JSON then."""

import json
import re
from collections.abc import Callable

from pydantic_core import from_json

from inflight.parsers.event_writer import MAX_HELD

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
# A string without an end reaches to the end of the text, so that no character is looked at twice.
_PYTHON = re.compile(
    r"""'((?:[^'\\]|\\.)*+)(?:'|\\?\Z)|"((?:[^"\\]|\\.)*+)(?:"|\\?\Z)|\b(True|False|None)\b""", re.DOTALL
)
_IN_PYTHON = re.compile(r"""\\x([0-9a-fA-F]{2})|\\U([0-9a-fA-F]{8})|(\\')|(")|\\.""", re.DOTALL)


class HeldValue:
    """At most `MAX_HELD` characters are held. If a longer value has begun as JSON, the rest is passed on as it arrives.
    Otherwise the value is a string.

    Args:
        pass_on: writes more of the call's arguments.
        convert: makes the JSON of a value that was held.
        is_string: the value is a string, so it need not be held.
        unless: words, such as null, that are not strings even if `is_string` is True. The value is held as long as it may
            become one of them.
    """

    def __init__(
        self,
        pass_on: Callable[[str], None],
        convert: Callable[[str], str],
        *,
        is_string: bool = False,
        unless: tuple[str, ...] = (),
    ) -> None:
        self._pass_on = pass_on
        self._convert = convert
        self._is_string = is_string
        self._unless = unless
        self._is_held = not is_string or bool(unless)
        self._pieces: list[str] = []
        self._num_held = 0
        if not self._is_held:
            pass_on('"')

    def write(self, text: str) -> None:
        if self._is_held:
            room = MAX_HELD - self._num_held
            self._pieces.append(text[:room])
            self._num_held += len(self._pieces[-1])
            text = text[room:]
            if self._num_held == MAX_HELD or (self._is_string and not self._may_be_a_word()):
                self._release()
        if not self._is_held:
            self._pass_on(escaped(text) if self._is_string else text)

    def end(self, *, is_cut: bool = False) -> None:
        """The value is complete, or `is_cut`: then the text has ended within the value, which is passed on as it is."""
        if self._is_held:
            text = "".join(self._pieces)
            self._pass_on(text if is_cut else self._convert(text))
        elif self._is_string and not is_cut:
            self._pass_on('"')

    def _may_be_a_word(self) -> bool:
        text = "".join(self._pieces)
        return any(word.startswith(text) for word in self._unless)

    def _release(self) -> None:
        text = "".join(self._pieces)
        self._is_held, self._pieces = False, []
        self._is_string = self._is_string or not _begins_json(text)
        self._pass_on(f'"{escaped(text)}' if self._is_string else text)


def escaped(text: str) -> str:
    """The text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(text: str) -> str:
    """Returns the JSON for a value that a model has written without quotes."""
    text = _PYTHON_WORDS.get(text, text)
    if _is_json(text):
        return text
    if text.lstrip()[:1] in ("{", "["):
        translated = _PYTHON.sub(_translate, text)
        if _is_json(translated):
            return translated
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _begins_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
        return not text[_DECODER.raw_decode(text, len(text) - len(text.lstrip(" \t\r\n")))[1] :].strip(" \t\r\n")
    except (ValueError, RecursionError) as error:  # only the second call raises these: the value has not ended
        return isinstance(error, (json.JSONDecodeError, RecursionError))


def _translate(found: re.Match[str]) -> str:
    """A string or a word of Python as JSON. What JSON cannot say stays, so that the whole is no JSON."""
    single, double, word = found.groups()
    if word is not None:
        return _PYTHON_WORDS[word]
    return f'"{_IN_PYTHON.sub(_translate_escape, single if double is None else double)}"'


def _translate_escape(found: re.Match[str]) -> str:
    byte, character, quote, double_quote = found.groups()
    if byte is not None:
        return f"\\u00{byte}"
    if character is not None:
        code = int(character, 16)
        return escaped(chr(code)) if code < 0x110000 and not 0xD800 <= code < 0xE000 else found.group()
    return "'" if quote is not None else '\\"' if double_quote is not None else found.group()
