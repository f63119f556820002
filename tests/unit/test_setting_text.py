"""Values that are written as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.setting_text import parse_bytes, parse_count, parse_json_object


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1500000", 1_500_000),
        ("100b", 100),
        ("3k", 3 * 2**10),
        ("3KiB", 3 * 2**10),
        ("512M", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        (" 2 GB ", 2 * 2**30),
        ("2t", 2 * 2**40),
    ],
)
def test_a_number_of_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "2x", "-1", "1e9", "2 3", "1.G", "1234567890123456", "2Gi B"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes like"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("32768", 32_768),
        ("-1", -1),
        ("32k", 32_000),
        ("32K", 32_768),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1.5k", 1500),
        (" 7 ", 7),
        ("0.5K", 512),
    ],
)
def test_a_number_of_tokens(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "2g", "1.5", "0.0001k", "1e3", "\u0663", "1234567890123456", "3 k"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens like"):
        parse_count(text)


def test_a_json_object_as_text_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[1]")
    assert parse_json_object(' {"a": 1}') == parse_json_object(str(tmp_path / "a.json")) == {"a": 1}
    for text, message in (
        ("{", "neither a JSON object nor"),
        ("nothing", "neither"),
        (f"{tmp_path}/list.json", "a list"),
        ('{"a":' + "[" * 100_000, "neither"),
        ("/dev/zero", "larger than"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "'b' more than once"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_json_object(text)


def test_the_largest_file(tmp_path: Path) -> None:
    file, text = tmp_path / "a.json", '{"a": 1}'
    file.write_text(text.ljust(16 * 2**20))
    assert parse_json_object(str(file)) == {"a": 1}
    file.write_text(text.ljust(16 * 2**20 + 1))
    with pytest.raises(ValueError, match="larger than 16777216 bytes"):
        parse_json_object(str(file))
