"""Answers of completions: the index of a choice, what is echoed and what is hidden, and chunks."""

from __future__ import annotations

import json
from typing import Any

from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.openai.completion_presenter import CompletionPresenter
from tests.unit.entrypoints.outputs import completion, opened, output, request, row


def presenter(num_prompts: int = 1, n: int = 1, **more: Any) -> CompletionPresenter:
    return CompletionPresenter(AnswerTo("id", request(num_prompts, n=n, **more), "fp", None))


def test_a_choice_is_counted_over_prompts_and_n() -> None:
    def outputs() -> list[Any]:
        return [output(*(completion(f"{p}{i}", index=i, finish_reason="stop") for i in range(2))) for p in range(2)]

    body = json.loads(presenter(2, 2).body(outputs()))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "00"),
        (1, "01"),
        (2, "10"),
        (3, "11"),
    ]
    shown = presenter(2, 2, stream=True)
    chunks = [chunk for p, each in enumerate(outputs()) for chunk in opened(shown.chunks(p, each))]
    found = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks]
    assert found == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    (chunk,) = opened(shown.chunks(1, output(completion("x", index=1))))  # a step may change one choice only
    assert chunk["choices"][0]["index"] == 3


def test_a_token_without_text_is_a_chunk() -> None:
    """A client measures its tokens' times by them."""
    shown = presenter(stream=True)
    (chunk,) = opened(shown.chunks(0, output(completion("", 1))))
    assert chunk["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None
    }  # fmt: skip
    assert shown.chunks(0, output(completion("", 0))) == []
    (chunk,) = opened(shown.chunks(0, output(completion("", 0, finish_reason="abort"))))
    assert chunk["choices"][0]["finish_reason"] == "abort"


def test_the_hidden_token_is_nowhere() -> None:
    """The engine draws one where max_tokens is 0; only the prompt is shown."""
    hidden = completion("x", 1, finish_reason="length", logprobs=[row("x")])
    body = json.loads(
        presenter(echo=True, prompt_only=True, top_logprobs=1).body([output(hidden, prompt_logprobs=[None])])
    )
    assert body["choices"][0]["text"] == "p0 "
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert body["usage"]["completion_tokens"] == 0

    shown = presenter(echo=True, prompt_only=True, stream=True, include_usage=True, return_token_ids=True)
    (chunk,) = opened(shown.chunks(0, output(completion("x", 1, finish_reason="length"))))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["token_ids"]) == ("p0 ", [])
    usage = shown.usage_chunk()
    assert opened([usage])[0]["usage"]["completion_tokens"] == 0
    assert presenter(prompt_only=True, stream=True).chunks(0, output(completion("x", 1))) == []


def test_the_prompt_is_echoed_once() -> None:
    shown = presenter(echo=True, stream=True, top_logprobs=1)
    first = output(completion("a", logprobs=[row("a")]), prompt_logprobs=[None, row("é"), row("c")])
    chunks = opened(shown.chunks(0, first)) + opened(shown.chunks(0, output(completion("b", logprobs=[row("b")]))))
    one, two = (chunk["choices"][0] for chunk in chunks)
    assert (one["text"], two["text"]) == ("p0 a", "b")
    assert one["logprobs"]["tokens"] == ["", "é", "c", "a"]
    assert (one["logprobs"]["text_offset"], two["logprobs"]["text_offset"]) == ([0, 0, 1, 2], [3])


def test_prompt_logprobs_are_of_a_whole_answer() -> None:
    shown = presenter(parts=("prompt_logprobs",))
    body = json.loads(
        shown.body([output(completion("a", finish_reason="stop"), prompt_logprobs=[None, row("b", -2.0)])])
    )
    entry = {"7": {"logprob": -2.0, "rank": 1, "decoded_token": "b"}}
    assert body["choices"][0]["prompt_logprobs"] == [None, entry]
