"""Wrong bodies: few errors are collected of one, and few of them compared."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from inflight.entrypoints.http.error_handlers import validation_error
from inflight.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

MANY = 100_000
USER: Any = {"role": "user", "content": "x"}

WRONG: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "prompt": (CompletionRequest, {"prompt": [None] * MANY}),
    "token ids": (CompletionRequest, {"prompt": [[1, *["a"] * MANY]]}),
    "allowed_token_ids": (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["a"] * MANY}),
    "guided_choice": (CompletionRequest, {"prompt": "x", "guided_choice": [None] * 9_999}),
    "messages": (ChatCompletionRequest, {"messages": [{}] * 9_999}),
    "content": (ChatCompletionRequest, {"messages": [{**USER, "content": [{}] * 9_999}]}),
    "much content": (ChatCompletionRequest, {"messages": [{**USER, "content": [{}] * MANY}]}),
    "messages to tokenize": (TokenizeRequest, {"messages": [{}] * 9_999}),
    "tokens": (DetokenizeRequest, {"tokens": [None] * MANY}),
}


@pytest.mark.parametrize("name", WRONG)
def test_few_errors_are_collected(name: str) -> None:
    model, body = WRONG[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10


def test_the_first_errors_are_told() -> None:
    """To find the branch of a union that got furthest, each is compared with each."""
    errors = [{"type": "missing", "loc": ("body", f"field{i}"), "msg": ""} for i in range(3000)]
    begin = time.thread_time()
    assert validation_error(errors, None).body().count(b"this field is required") == 3
    assert time.thread_time() - begin < 2
