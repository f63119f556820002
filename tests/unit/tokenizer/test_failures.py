"""A text on which the tokenizers library panics ends one request, not a thread or a run."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.hub import EMBEDDED_MODEL
from inflight.tokenizer.folder_tokenizer import folder_tokenizer

PanicException = type("PanicException", (BaseException,), {})


class Broken:
    """The library's tokenizer, whose calls raise."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def encode_batch(self, *_: Any, **__: Any) -> Any:
        raise self._error

    decode = encode_batch


def test_a_panic_is_an_error_of_the_request() -> None:
    tokenizer = folder_tokenizer(EMBEDDED_MODEL)
    tokenizer._backend = Broken(PanicException("retry-limit-in-match over"))  # type: ignore[assignment]  # a stand-in
    with pytest.raises(InvalidRequestError, match="cannot encode this text: retry-limit"):
        tokenizer.encode("x")
    with pytest.raises(InvalidRequestError, match="cannot decode these tokens: retry-limit"):
        tokenizer.decode([1])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), TypeError("x")])
def test_other_errors_stay(error: BaseException) -> None:
    tokenizer = folder_tokenizer(EMBEDDED_MODEL)
    tokenizer._backend = Broken(error)  # type: ignore[assignment]  # a stand-in
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1])):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


def test_a_lone_surrogate_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 1"):
        folder_tokenizer(EMBEDDED_MODEL).encode("a\ud800")
