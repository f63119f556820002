"""Reads values that are written as text: numbers of bytes ("2G") and of tokens ("32k"), and JSON objects."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_JSON_BYTES = 16 * 2**20  # largest JSON file that an option may name


def parse_bytes(text: str) -> int:
    """Reads a number of bytes: "1500000", "512M", "2GiB" or "1.5g". Units are powers of 1024.

    Raises:
        ValueError: the text has none of these forms.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes like 1500000, 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str) -> int:
    """Reads a number of tokens: "32768", "32k" (32,000) or "32K" (32,768). As in vLLM, units are powers of 1000 in small
    letters and powers of 1024 in capitals.

    Raises:
        ValueError: the text has none of these forms, or is not a whole number.
    """
    match = re.fullmatch(r"(-?\d{1,15}(?:\.\d+)?)([kmKM]?)", text.strip(), re.ASCII)
    units = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20, "": 1}
    unit = units[match[2]] if match else 1
    if match is None or (count := Fraction(match[1]) * unit).denominator != 1:
        raise ValueError(f"{text!r} is not a number of tokens like 32768, 32k (32,000) or 32K (32,768)")
    return int(count)


def parse_json_object(text: str) -> dict[str, Any]:  # Any: JSON
    """Reads a JSON object from `text`, or from the file that `text` names.

    Raises:
        ValueError: the text is neither a JSON object nor the name of a file with one.
    """
    source = text.strip()
    try:
        content = source if source.startswith("{") else _read(Path(source))
        found = json.loads(content, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{source!r} is neither a JSON object nor a file that holds one: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{source!r} holds no JSON object, but a {type(found).__name__}")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} more than once")
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise ValueError(f"the file is larger than {_MAX_JSON_BYTES} bytes")
    return content.decode()
