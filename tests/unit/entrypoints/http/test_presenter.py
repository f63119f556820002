"""What all answers share: usage, and the members of a chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.entrypoints.http.presenter import AnswerTo, UsageCount
from inflight.entrypoints.openai.chat_presenter import ChatPresenter
from inflight.entrypoints.openai.completion_presenter import CompletionPresenter
from tests.unit.entrypoints.outputs import completion, opened, output, request


def presenter(kind: str = "chat", num_prompts: int = 1, **more: Any) -> ChatPresenter | CompletionPresenter:
    made = ChatPresenter if kind == "chat" else CompletionPresenter
    return made(AnswerTo("id", request(num_prompts, **more), "fp", None))


def test_usage_sums_prompts_and_choices() -> None:
    count = UsageCount()
    count.add(0, output(completion("ab"), completion("c", index=1), prompt=3, num_cached_tokens=2))
    count.add(1, output(completion("d"), prompt=4, num_cached_tokens=1))
    count.add(0, output(completion("e"), prompt=3, num_cached_tokens=2))  # more of the first: its prompt counts once
    assert count.as_json() == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_usage_of_a_whole_answer_is_of_all_prompts() -> None:
    outputs = [output(completion("ab", finish_reason="stop"), prompt=count) for count in (3, 4)]
    usage = json.loads(presenter("completions", 2).body(outputs))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 4, 11)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_chunks_have_the_usage_that_was_asked_for(kind: str) -> None:
    def stream(**more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        shown = presenter(kind, stream=True, **more)
        chunks = opened(shown.chunks(0, output(completion("a"))) + shown.chunks(0, output(completion("b"))))
        last = shown.usage_chunk()
        return chunks, opened([last]) if last else []

    chunks, last = stream()
    assert last == [] and all("usage" not in chunk for chunk in chunks)
    chunks, last = stream(include_usage=True)
    assert all(chunk["usage"] is None for chunk in chunks)  # OpenAI's clients read the member in every chunk
    assert last[0]["choices"] == [] and last[0]["usage"]["completion_tokens"] == 2
    chunks, _ = stream(include_usage=True, continuous_usage=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-2:] == [1, 2]


@pytest.mark.parametrize(("kind", "name"), [("chat", "chat.completion.chunk"), ("completions", "text_completion")])
def test_every_chunk_says_whose_it_is(kind: str, name: str) -> None:
    for chunk in opened(presenter(kind, stream=True).chunks(0, output(completion("a")))):
        assert chunk["object"] == name
        assert (chunk["id"], chunk["model"], chunk["system_fingerprint"]) == ("id", "m", "fp")
        assert isinstance(chunk["created"], int)


def test_an_answer_with_logprobs_is_the_same_json() -> None:
    """It is written in pieces, so that other threads can run."""
    plain = json.loads(presenter().body([output(completion("é"))]))
    slow = json.loads(presenter(parts=("prompt_logprobs",)).body([output(completion("é"))]))
    del plain["created"], slow["created"]
    assert plain == slow
