"""`read_keep_alive`: how long a model stays loaded without requests, in the form of Ollama's `keep_alive`."""

import math
import re

from inflight.errors import ConfigError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def read_keep_alive(value: float | str) -> float:
    """Returns seconds: 300 for 300, "300", "5m" or "4m60s"; infinity for a negative value.

    Raises:
        ConfigError: it is no such value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"keep_alive={value!r} is neither seconds nor a time such as '5m'")
    try:
        seconds = float(value)
    except ValueError:
        text = str(value).strip()
        unsigned = text.lstrip("+-")
        parts = _PART.findall(unsigned)
        if not parts or "".join(map("".join, parts)) != unsigned:
            raise ConfigError(f"keep_alive={value!r} is neither seconds nor a time such as '5m'") from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        if text.startswith("-"):
            seconds = -seconds
    if math.isnan(seconds):
        raise ConfigError(f"keep_alive={value!r} is neither seconds nor a time such as '5m'")
    return math.inf if seconds < 0 else seconds
