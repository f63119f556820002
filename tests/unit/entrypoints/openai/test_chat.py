"""Where a chat's answer begins in the reasoning, and what of a request becomes a constraint."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.entrypoints.openai.chat import _REASONING_TAIL, _constrain, _parser_factory, _sampling_params
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.parsers.events import ContentDelta, ReasoningDelta
from inflight.parsers.markup import MARKUPS
from inflight.sampling_params import SamplingParams

HELLO: list[Any] = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "cache": 1}}


class Engine:
    """A token is a character."""

    default_params = SamplingParams()

    async def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def server(**parsers: Any) -> Any:
    return SimpleNamespace(engine=Engine(), parsers=SimpleNamespace(**{"tool": None, "reasoning": None, **parsers}))


def request(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": HELLO, **more})


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("a long conversation, then the assistant<think>", True),
        ("a long conversation, then the assistant<think>\n", True),
        ("<think> at the prompt's beginning, and then something else", False),
        ("<think>\n\n</think>", False),
    ],
)
def test_the_reasoning_is_sought_at_the_prompts_end(prompt: str, inside: bool) -> None:
    assert len("<think>\n") <= _REASONING_TAIL
    found = asyncio.run(_parser_factory(server(reasoning="qwen3"), request(), None, list(map(ord, prompt))))
    assert found is not None
    kind = ReasoningDelta if inside else ContentDelta
    parser = found()
    assert [*parser.push("thought"), *parser.finish()] == [kind("thought")]


def test_without_parsers_there_is_none() -> None:
    assert asyncio.run(_parser_factory(server(), request(), [TOOL], [65])) is None
    assert asyncio.run(_parser_factory(server(tool="hermes"), request(), None, [65])) is None


def test_logprobs() -> None:
    def logprobs(**more: Any) -> int | None:
        return _sampling_params(server(), request(**more)).logprobs

    assert logprobs() is None
    assert logprobs(logprobs=True) == 0
    assert logprobs(logprobs=True, top_logprobs=2) == 2
    assert logprobs(top_logprobs=0) is logprobs(logprobs=False, top_logprobs=0) is None
    with pytest.raises(FieldError, match="top_logprobs needs logprobs"):
        logprobs(top_logprobs=1)


@pytest.mark.parametrize(
    ("response_format", "constraint", "lenient"),
    [
        ({"type": "json_object"}, "json_object", False),
        ({"type": "json_object", "schema": {"type": "object"}}, "json", True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, "json", True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": False}}, "json", True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}, "json", False),
    ],
)
def test_a_response_format_is_a_constraint(response_format: Any, constraint: str, lenient: bool) -> None:
    found = _sampling_params(server(), request(response_format=response_format)).structured_outputs
    assert found is not None
    assert (found.constraint, found.lenient) == (constraint, lenient)


def test_tools_and_json_become_one_constraint() -> None:
    body = request(tools=[TOOL], response_format={"type": "json_object"})
    params, tools = _constrain(server(markup=MARKUPS[0]), body, "auto")
    assert params.structured_outputs is not None and params.structured_outputs.constraint == "structural_tag"
    assert '"otherwise"' in str(params.structured_outputs.structural_tag)
    assert tools is not None and tools[0]["function"]["name"] == "f"
    params, tools = _constrain(server(markup=MARKUPS[0]), body, "none")
    assert params.structured_outputs is not None and params.structured_outputs.constraint == "json_object"
    assert tools is None


@pytest.mark.parametrize(("wanted", "left"), [(None, [1, 2, 3, 4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (-1, [2, 3, 4])])
def test_a_prompt_keeps_its_end(wanted: int | None, left: list[int]) -> None:
    assert request(truncate_prompt_tokens=wanted).truncate_prompt([1, 2, 3, 4], max_model_len=4) == left
