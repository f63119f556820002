"""What a damaged file makes Python or a library raise becomes one named error."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.damaged_files import named_errors
from inflight.errors import CheckpointError, ConfigError, InvalidRequestError

PanicException = type("PanicException", (BaseException,), {})  # as a library in Rust makes it


@pytest.mark.parametrize(
    "error",
    [
        TypeError("x"), ValueError("x"), ZeroDivisionError("x"), RecursionError("x"), OverflowError("x"), KeyError("x"),
        MemoryError("x"), OSError("x"), AssertionError("x"), PanicException("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "x"),
    ],
)  # fmt: skip
def test_any_error_becomes_one_that_names_the_file(error: BaseException) -> None:
    message = r"^/a/file: its header cannot be read \(\w+: .*x.*\); "
    with (
        pytest.raises(CheckpointError, match=message) as caught,
        named_errors(CheckpointError, Path("/a/file"), "its header"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("x"),
        ConfigError("x"),
        KeyboardInterrupt(),
        SystemExit(),
        ConnectionError("x"),
        TimeoutError(),
    ],
)
def test_our_own_errors_and_ends_of_the_process_stay(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, named_errors(CheckpointError, Path("/a/file"), "its header"):
        raise error
    assert caught.value is error


def test_a_long_message_of_a_library_is_cut() -> None:
    with pytest.raises(ConfigError) as caught, named_errors(ConfigError, Path("f"), "it"):
        raise ValueError("x" * 10**6)
    assert len(str(caught.value)) < 1000
