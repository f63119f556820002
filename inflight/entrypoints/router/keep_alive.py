"""`read_keep_alive`: how long a model stays loaded without requests, in the format of Ollama's `keep_alive`."""

import math
import re

from inflight.errors import ConfigError

_MICROSECONDS = ("us", "\u00b5s", "\u03bcs")  # there are two letters that look like this one
_UNITS = {"ns": 1e-9, **dict.fromkeys(_MICROSECONDS, 1e-6), "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_PART = re.compile(rf"({_NUMBER})({'|'.join(_UNITS)})")
_TEXT = re.compile(rf"([+-]?)(?:({_NUMBER})|((?:(?:{_NUMBER})(?:{'|'.join(_UNITS)}))+))")


def read_keep_alive(value: float | str, name: str = "keep_alive") -> float:
    """Returns seconds: 300 for 300, "300", "5m" or "4m60s"; infinity for a negative value.

    A text is as Ollama reads it (time.ParseDuration of Go). Without a unit it is in seconds, which Ollama refuses.

    Args:
        name: of the field, for the error.

    Raises:
        ConfigError: the value is not of this form.
    """
    seconds = math.nan
    if isinstance(value, str):
        seconds = _read_text(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # an integer of hundreds of digits
            seconds = math.inf  # also if it is negative
    if math.isnan(seconds):
        raise ConfigError(f"{name}={repr(value)[:100]} is neither a number of seconds nor a time such as '5m'")
    return math.inf if seconds < 0 else seconds


def _read_text(text: str) -> float:
    """Seconds; NaN for another text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return math.nan
    sign, number, parts = found.groups()
    seconds = float(number) if number else sum(float(each) * _UNITS[unit] for each, unit in _PART.findall(parts))
    return -seconds if sign == "-" else seconds
