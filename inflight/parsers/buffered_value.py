"""`BufferedValue`: an argument that a model writes without quotes. It is buffered until it ends, and becomes JSON then."""

import json
import re
from collections.abc import Callable

from pydantic_core import from_json

from inflight.parsers.event_writer import MAX_BUFFERED
from inflight.parsers.json_words import escaped
from inflight.parsers.repair import only_value
from inflight.parsers.repair_budget import RepairBudget

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_FENCED = re.compile(r"\s*```[A-Za-z]*\s*(.*?)\s*```\s*", re.DOTALL)


class BufferedValue:
    """At most `MAX_BUFFERED` characters are buffered. If a longer value has begun as JSON, the rest is passed on as it arrives.
    Otherwise the value is a string.

    Args:
        pass_on: writes more of the call's arguments.
        convert: makes the JSON of a value that was buffered.
        is_string: the value is a string, so it need not be buffered.
        unless: words, such as null, that are not strings even if `is_string` is True. The value is buffered as long as it may
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
        self._is_buffered = not is_string or bool(unless)
        self._pieces: list[str] = []
        self._num_buffered = 0
        if not self._is_buffered:
            pass_on('"')

    def write(self, text: str) -> None:
        if self._is_buffered:
            room = MAX_BUFFERED - self._num_buffered
            self._pieces.append(text[:room])
            self._num_buffered += len(self._pieces[-1])
            text = text[room:]
            if self._num_buffered == MAX_BUFFERED or (self._is_string and not self._may_be_a_word()):
                self._release()
        if not self._is_buffered:
            self._pass_on(escaped(text) if self._is_string else text)

    def end(self, *, is_cut: bool = False) -> None:
        """The value is complete, or `is_cut`: then the text has ended within the value, which is passed on as it is."""
        if self._is_buffered:
            text = "".join(self._pieces)
            self._pass_on(text if is_cut else self._convert(text))
        elif self._is_string and not is_cut:
            self._pass_on('"')

    def _may_be_a_word(self) -> bool:
        text = "".join(self._pieces)
        return any(word.startswith(text) for word in self._unless)

    def _release(self) -> None:
        text = "".join(self._pieces)
        self._is_buffered = False
        self._pieces = []
        self._is_string = self._is_string or not _begins_json(text)
        self._pass_on(f'"{escaped(text)}' if self._is_string else text)


def as_json(text: str, budget: RepairBudget) -> str:
    """Returns the JSON for a value that a model has written without quotes. An object or a list is read like the arguments of a
    call (`repair`), also in a block of Markdown. Any other text, and one that has more than one reading, is a string."""
    word = _PYTHON_WORDS.get(text, text)
    if _is_json(word):
        return word
    fenced = _FENCED.fullmatch(text)
    body = fenced[1] if fenced else text.strip()
    found = only_value(body, budget) if body.startswith(("{", "[", "(")) else None
    if found is None or not _is_json(found):
        return json.dumps(text, ensure_ascii=False)
    return found


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
