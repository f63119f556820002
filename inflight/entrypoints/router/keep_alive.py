"""`read_keep_alive`: how long a model stays loaded without requests, in the format of Ollama's `keep_alive`."""

import math
import re

from inflight.errors import ConfigError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def read_keep_alive(value: float | str, name: str = "keep_alive") -> float:
    """Returns seconds: 300 for 300, "300", "5m" or "4m60s"; infinity for a negative value.

    Args:
        name: of the field, for the error.

    Raises:
        ConfigError: the value is not of this form.
    """
    wrong = ConfigError(f"{name}={repr(value)[:100]} is neither a number of seconds nor a time such as '5m'")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong
    try:
        seconds = float(value)
    except OverflowError:  # an integer of hundreds of digits
        seconds = math.inf
    except ValueError:
        text = str(value).strip()
        unsigned = text.lstrip("+-")
        parts = _PART.findall(unsigned)
        if not parts or "".join(map("".join, parts)) != unsigned:
            raise wrong from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        if text.startswith("-"):
            seconds = -seconds
    if math.isnan(seconds):
        raise wrong
    return math.inf if seconds < 0 else seconds
