"""No character of a line of JSON is a line break for any client."""

from __future__ import annotations

import json
import re

import pytest
from pydantic_core import PydanticSerializationError

from inflight.entrypoints.json_lines import row_to_json, to_json
from inflight.entrypoints.openai.presenter import to_json_in_slices
from tests.unit.entrypoints.api_client import serving

# all characters at which `str.splitlines` cuts, and some neighbours
TEXT = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b \x84\x86\xa8\u2027\u202a\ufeff\x7f é日🙂"


@pytest.mark.parametrize("encode", [to_json, row_to_json, to_json_in_slices])
def test_json_has_one_line(encode: object) -> None:
    value = {TEXT: [TEXT, {"x": TEXT}], "plain": "p"}
    text = encode(value).decode("utf-8")  # type: ignore[operator]
    assert len(text.splitlines()) == 1
    assert json.loads(text) == value
    assert "é日🙂" in text


def test_infinite_numbers_and_surrogates() -> None:
    assert to_json([float("inf")], inf_nan_mode="null") == b"[null]"
    with pytest.raises(PydanticSerializationError):
        to_json("\ud800")
    assert json.loads(row_to_json({"a": "\ud800"})) == {"a": "\ud800"}


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
# path -> the body of a request
ASKED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"prompt": TEXT, "echo": True, "logprobs": 1},
    "/v1/responses": {"input": TEXT, "instructions": TEXT, "metadata": {TEXT: TEXT}, "user": TEXT},
    "/v1/messages": {**CHAT, "model": "played", "max_tokens": 99},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": TEXT, "system": TEXT},
}


@pytest.mark.parametrize("stream", [True, False])
def test_all_apis_write_lines_that_every_client_reads(stream: bool) -> None:
    said = "a\x85b\u2028c\u2029d"
    with serving() as api:
        api.core.texts = [said]
        for path, body in ASKED.items():
            answer = api.post(path, {**body, "stream": stream})
            assert answer.status == 200, answer.text
            assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
            assert said in "".join(texts_of(answer.text))
        wrong = api.post("/v1/chat/completions", {**CHAT, "model": TEXT})
        assert wrong.status == 404 and len(wrong.text.splitlines()) == 1


def texts_of(answer: str) -> list[str]:
    """The texts of an answer, which are in members with different names."""
    found = re.findall(r'"(?:content|text|delta|response)":("(?:[^"\\]|\\.)*")', answer)
    return [json.loads(each) for each in found]
