"""The assistant's message of a completion: content, reasoning and calls. tests/unit/parsers has the forms of each family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from inflight import LLM, InvalidRequestError, SamplingParams
from inflight.entrypoints.assistant_message import assistant_message
from inflight.outputs import CompletionOutput
from inflight.parsers.selector import DetectedParsers
from inflight.tokenizer.tokenizer import Tokenizer
from tests.unit.entrypoints.mock_llm import mock_arguments

TOOL: Any = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
HERMES = '<tool_call>\n{"name": "find", "arguments": {"key": "a"}}\n</tool_call>'
END = 0


class Words:
    """A tokenizer with a token for each word. Words in square brackets, and the end token 0, are special."""

    def __init__(self) -> None:
        self.words = ["[END]"]

    def encode(self, text: str) -> list[int]:
        self.words += [word for word in text.split(" ") if word not in self.words]
        return [self.words.index(word) for word in text.split(" ")]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        words = [self.words[token_id] for token_id in token_ids]
        return " ".join(word for word in words if not (skip_special_tokens and word.startswith("[")))


def read(
    text: str,
    parsers: DetectedParsers,
    *,
    prompt: str = "hello",
    tools: Any = (TOOL,),
    stop: str | None = None,
    finish_reason: str = "stop",
    ends: bool = True,
) -> dict[str, Any]:
    tokenizer = Words()
    token_ids = tokenizer.encode(text)
    shown = tokenizer.decode(token_ids)
    if stop is not None:
        shown = shown[: shown.index(stop)]
    completion = CompletionOutput(
        index=0,
        text=shown,
        token_ids=[*token_ids, END] if ends else token_ids,
        finish_reason=finish_reason,
        stop_reason=stop,
    )
    prompt_ids = tokenizer.encode(prompt)
    message = assistant_message(completion, prompt_ids, cast("Tokenizer", tokenizer), parsers, tools)
    for call in message.get("tool_calls", ()):
        assert call.pop("id")
    return message


def call(key: str = "a") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "arguments": json.dumps({"key": key})}}


HERMES_QWEN = DetectedParsers("hermes", "qwen3", None)
MISTRAL = DetectedParsers("mistral", "mistral", None)
NOTHING = DetectedParsers(None, None, None)


@pytest.mark.parametrize(
    ("text", "parsers", "expected"),
    [
        ("just text", NOTHING, {"content": "just text"}),
        ("just text", HERMES_QWEN, {"content": "just text"}),
        (HERMES, HERMES_QWEN, {"content": "", "tool_calls": [call()]}),
        (HERMES, NOTHING, {"content": HERMES}),
        (
            f"<think> well </think> Yes. {HERMES}\n{HERMES}",
            HERMES_QWEN,
            {"content": "Yes.", "reasoning_content": "well", "tool_calls": [call(), call()]},
        ),
        ("<think> well </think> Yes.", HERMES_QWEN, {"content": "Yes.", "reasoning_content": "well"}),
        # the markup consists of special tokens, which are not in the completion's text
        ('Yes. [TOOL_CALLS] [{"name": "find", "arguments": {"key": "a"}}]', MISTRAL, None),
        ("[THINK] well [/THINK] Yes.", MISTRAL, {"content": "Yes.", "reasoning_content": "well"}),
        ("no markup", MISTRAL, {"content": "no markup"}),
    ],
)
def test_the_parts_of_a_message(text: str, parsers: DetectedParsers, expected: dict[str, Any] | None) -> None:
    message = read(text, parsers)
    assert message.pop("role") == "assistant"
    if expected is None:
        assert message["content"] == "Yes."
        assert [each["function"]["name"] for each in message["tool_calls"]] == ["find"]
    else:
        assert message == expected


def test_reasoning_that_the_prompt_has_opened_or_closed() -> None:
    opened = read("well </think> Yes.", HERMES_QWEN, prompt="question <think>")
    assert opened == {"role": "assistant", "content": "Yes.", "reasoning_content": "well"}
    cut = read("well and", HERMES_QWEN, prompt="question <think>", finish_reason="length", ends=False)
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "well and"}
    assert read("Yes.", HERMES_QWEN, prompt="question <think> </think>")["content"] == "Yes."


def test_without_tools_no_text_is_a_call() -> None:
    for tools in (None, (), []):
        assert read(HERMES, HERMES_QWEN, tools=tools) == {"role": "assistant", "content": HERMES}


def test_a_stop_text_ends_the_message_also_where_special_tokens_are_needed() -> None:
    for parsers in (HERMES_QWEN, MISTRAL):
        assert read("one two STOP three", parsers, stop="STOP", ends=False)["content"].rstrip() == "one two"


def test_a_message_goes_back_into_the_chat() -> None:
    with LLM(**mock_arguments()) as llm:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        for index in (0, 1):
            message = llm.assistant_message(output, tools=[TOOL], index=index)
            assert message["content"].strip() == output.outputs[index].text.strip()
            assert len(llm.chat([*messages, message, *messages], params, use_tqdm=False)) == 1
        with pytest.raises(InvalidRequestError, match="reasoning_field"):
            llm.assistant_message(output, reasoning_field="thoughts")
        with pytest.raises(InvalidRequestError, match="has 2 completions"):
            llm.assistant_message(output, index=2)
    with LLM(**mock_arguments(skip_tokenizer_init=True)) as llm:
        (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.assistant_message(output)
