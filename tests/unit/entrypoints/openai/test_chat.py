"""Where a chat's answer begins in the reasoning, and what of a request becomes a constraint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.http.chat import _REASONING_TAIL, _read, _reading, validate_chat
from inflight.entrypoints.http.chat_request import ChatRequest
from inflight.entrypoints.http.rendering import truncated
from inflight.entrypoints.http.validated import TokenPrompt, ValidatedRequest
from inflight.entrypoints.openai.chat import read_chat
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import InvalidRequestError
from inflight.interface.events import ContentDelta, ReasoningDelta, ToolCallStart
from inflight.interface.request import AnswerFrame
from inflight.parsers.markup import MARKUPS
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import RenderedChat
from tests.unit.entrypoints.refusals import refused

HELLO: list[Any] = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "cache": 1}}


class Template:
    def render_chat(self, messages: list[dict[str, Any]], **variables: Any) -> RenderedChat:
        """A template that writes what it was given."""
        thinks = variables["chat_template_kwargs"].get("enable_thinking", True)
        tools = "".join(tool["function"]["name"] for tool in variables["tools"] or ())
        return RenderedChat(f"[{tools}]" * bool(tools) + messages[-1]["content"] + "<think>" * thinks)


class Engine:
    """A token is a character."""

    default_params = SamplingParams()
    default_max_tokens: int | None = None
    tokenizer = None
    model = SimpleNamespace(max_model_len=100)
    chat_template = Template()

    async def render(self, render: Callable[[], RenderedChat]) -> RenderedChat:
        return render()

    async def encode(self, text: str, *, add_special_tokens: bool, behind: bool = False) -> list[int]:
        return [*[0] * add_special_tokens, *map(ord, text)]

    async def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def server(
    settings: ServerSettings = ServerSettings(),  # noqa: B008  frozen
    *,
    takes_images: bool = False,
    **parsers: Any,
) -> Any:
    found = SimpleNamespace(**{"tool": None, "reasoning": None, "markup": None, **parsers})
    return SimpleNamespace(
        engine=Engine(),
        parsers=found,
        settings=settings,
        model_names=("first",),
        check_model=lambda name: name or "first",
        writes_efforts=False,
        tool_support=SimpleNamespace(report=lambda: ()),
        new_images=lambda: RequestImages(are_read=takes_images),
    )


def request(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": HELLO, **more})


def read(**more: Any) -> ChatRequest:
    return read_chat(server(), request(**more))


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
    found, frame = asyncio.run(_reading(server(reasoning="qwen3"), read(), list(map(ord, prompt)), SamplingParams()))
    assert found is not None and frame == (INSIDE if inside else OPTIONAL)
    kind = ReasoningDelta if inside else ContentDelta
    parser = found()
    assert [*parser.push("thought"), *parser.finish()] == [kind("thought")]


def test_without_parsers_there_is_none() -> None:
    assert asyncio.run(_reading(server(), read(tools=[TOOL]), [65], SamplingParams())) == (None, None)
    assert asyncio.run(_reading(server(tool="hermes"), read(), [65], SamplingParams())) == (None, None)


def test_logprobs() -> None:
    def logprobs(**more: Any) -> int | None:
        return read(**more).params.logprobs

    assert logprobs() is None
    assert logprobs(logprobs=True) == 0
    assert logprobs(logprobs=True, top_logprobs=2) == 2
    assert logprobs(top_logprobs=0) is logprobs(logprobs=False, top_logprobs=0) is None
    with refused("top_logprobs"):
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
    found = read(response_format=response_format).params.structured_outputs
    assert found is not None
    assert (found.constraint, found.lenient) == (constraint, lenient)


def test_tools_and_json_become_one_constraint() -> None:
    json_tools = {"tools": [TOOL], "response_format": {"type": "json_object"}}
    chat, params = _read(server(markup=MARKUPS[0]), lambda: read(**json_tools))
    assert params.structured_outputs is not None and params.structured_outputs.constraint == "structural_tag"
    assert '"otherwise"' in str(params.structured_outputs.structural_tag)
    assert [tool["function"]["name"] for tool in chat.prompt.tools] == ["f"]
    chat, params = _read(server(markup=MARKUPS[0]), lambda: read(**json_tools, tool_choice="none"))
    assert params.structured_outputs is not None and params.structured_outputs.constraint == "json_object"
    assert not chat.prompt.tools


@pytest.mark.parametrize(("wanted", "left"), [(None, [1, 2, 3, 4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (-1, [2, 3, 4])])
def test_a_prompt_keeps_its_end(wanted: int | None, left: list[int]) -> None:
    prompt = TokenPrompt([1, 2, 3, 4], "text")
    assert truncated(prompt, wanted, max_model_len=4).token_ids == left
    with_images = TokenPrompt([1, 2, 3, 4], prepared=cast("Any", object()))
    if len(left) == 4:
        assert truncated(with_images, wanted, max_model_len=4) is with_images
        return
    with pytest.raises(InvalidRequestError) as raised:
        truncated(with_images, wanted, max_model_len=4)
    assert raised.value.param == "truncate_prompt_tokens"


def validated(server: Any, **more: Any) -> ValidatedRequest:
    return asyncio.run(validate_chat(server, partial(read_chat, server, request(**more))))


@pytest.mark.parametrize(
    ("fields", "default", "found"),
    [
        ({}, None, None),
        ({}, 50, 50),
        ({"max_tokens": 9}, 50, 9),
        ({"max_completion_tokens": 9}, None, 9),
        ({"max_completion_tokens": 9, "max_tokens": 8}, 50, 9),
        ({"max_completion_tokens": None, "max_tokens": 8}, 50, 8),
    ],
)
def test_the_length_of_an_answer(fields: dict[str, Any], default: int | None, found: int | None) -> None:
    """The default is that of the model's generation_config.json."""
    here = server()
    here.engine.default_max_tokens = default
    assert validated(here, **fields).params.max_tokens == found
    with refused("max_completion_tokens"):
        validated(here, max_tokens=8, max_completion_tokens=0)


def test_the_reasoning_has_the_names_that_are_asked_for() -> None:
    def names(*, include: bool | None = None, **settings: str) -> tuple[str, ...]:
        here = server(ServerSettings(**settings))  # type: ignore[arg-type]
        return validated(here, include_reasoning=include).presentation.reasoning_fields

    assert names() == names(include=True) == ("reasoning_content",)
    assert names(reasoning_field="reasoning") == ("reasoning",)
    assert names(reasoning_field="both") == ("reasoning_content", "reasoning")
    assert names(include=False) == names(include=False, reasoning_field="both") == ()


def test_everything_of_a_chat_reaches_the_engine() -> None:
    plain = validated(server())
    assert (plain.priority, plain.cache_salt, plain.presentation.model) == (0, "", "first")
    assert plain.prompts[0].token_ids == list(map(ord, "x<think>"))
    assert plain.params.skip_special_tokens and plain.make_parser is None
    full = validated(server(), priority=-3, cache_salt="salt", model="m", stream=True, truncate_prompt_tokens=2)
    assert (full.priority, full.cache_salt) == (-3, "salt")
    assert full.presentation.model == "m" and full.presentation.stream
    assert full.prompts[0].token_ids == list(map(ord, "k>"))
    assert validated(server(), add_special_tokens=True).prompts[0].token_ids[0] == 0


def test_markup_of_special_tokens_is_not_skipped() -> None:
    found = validated(server(tool="hermes"), tools=[TOOL])
    assert not found.params.skip_special_tokens
    assert found.make_parser is not None
    assert "".join(map(chr, found.prompts[0].token_ids)) == "[f]x<think>"
    assert validated(server(reasoning="qwen3")).params.skip_special_tokens


@pytest.mark.parametrize(("parallel", "num_calls"), [(None, 2), (True, 2), (False, 1)])
def test_at_most_one_call_if_calls_must_not_be_parallel(parallel: bool | None, num_calls: int) -> None:
    found = validated(server(tool="hermes", markup=MARKUPS[0]), tools=[TOOL], parallel_tool_calls=parallel)
    assert found.make_parser is not None
    events = found.make_parser().push('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2)
    assert sum(isinstance(event, ToolCallStart) for event in events) == num_calls


OFF = {"chat_template_kwargs": {"enable_thinking": False}}
JSON = {"response_format": {"type": "json_object"}}
OPTIONAL = AnswerFrame(begin="<think>", end="</think>")
INSIDE = AnswerFrame(begin="<think>", end="</think>", is_open=True)


@pytest.mark.parametrize(
    ("fields", "frame"),
    [
        ({}, INSIDE),
        (OFF, OPTIONAL),
        ({**OFF, "continue_final_message": True, "add_generation_prompt": False}, None),
        (
            {**OFF, "messages": [*HELLO, {"role": "assistant", "content": "<think>Hm"}]}
            | {"continue_final_message": True, "add_generation_prompt": False},
            INSIDE,
        ),
    ],
)
def test_the_frame_of_an_answer(fields: dict[str, Any], frame: AnswerFrame | None) -> None:
    found = validated(server(reasoning="qwen3"), **JSON, **fields)
    assert found.answer_frame == frame
    assert found.thinks_first is not bool(fields.get("continue_final_message"))
    assert validated(server(reasoning="qwen3"), **fields).answer_frame == (frame or OPTIONAL), (
        "of a text without a grammar"
    )
    assert validated(server(), **JSON, **fields).answer_frame is None, "the model does not think"
    assert found.make_parser is not None
    parser = found.make_parser()
    kind = ReasoningDelta if frame == INSIDE else ContentDelta
    assert [*parser.push("thought"), *parser.finish()] == [kind("thought")]


def test_a_bound_for_the_reasoning_comes_from_the_request() -> None:
    assert validated(server(reasoning="qwen3"), reasoning={"max_tokens": 5}).params.thinking_token_budget == 5
    found = validated(server(tool="hermes"), reasoning_effort="low")
    assert (found.params.thinking_token_budget, found.left_out) == (None, ("reasoning_effort",))


def test_a_call_may_come_instead_of_json_if_no_grammar_knows_its_markup() -> None:
    def calls(**fields: Any) -> tuple[str, ...]:
        frame = validated(server(tool="qwen3_coder"), tools=[TOOL], **fields).answer_frame
        return () if frame is None else frame.calls

    assert calls(**JSON) == ("<tool_call>",)
    assert calls(**JSON, tool_choice="none") == calls(structured_outputs={"choice": ["a"]}) == calls() == ()


def test_without_a_grammar_no_reasoning_is_looked_for_behind_calls() -> None:
    both = server(tool="hermes", reasoning="qwen3")
    for fields, calls in (({"tools": [TOOL]}, ("<tool_call>",)), ({"tools": [TOOL], "tool_choice": "none"}, ())):
        frame = validated(both, **fields).answer_frame
        assert frame is not None and frame.calls == calls


def test_the_variables_of_the_template() -> None:
    def variables(**fields: Any) -> dict[str, Any]:
        chat = read(**fields)
        return {**chat.thoughts.template_variables, **chat.prompt.variables}

    assert variables() == {}
    assert variables(reasoning_effort="high") == {"reasoning_effort": "high"}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    on = {"enable_thinking": True, "thinking": True}
    assert variables(chat_template_kwargs={"enable_thinking": True, "x": 1}) == {**on, "x": 1}
    here = server()
    here.settings = ServerSettings(default_chat_template_kwargs={"enable_thinking": False})
    assert validated(here).prompts[0].token_ids == [ord("x")]  # the server's variable
    assert len(validated(here, chat_template_kwargs={"enable_thinking": True}).prompts[0].token_ids) > 1


@pytest.mark.parametrize(
    ("choice", "tools", "found"),
    [
        (None, [TOOL], "auto"),
        (None, None, "none"),
        ("auto", None, "none"),
        ("none", [TOOL], "none"),
        ("required", [TOOL], "required"),
        ({"type": "function", "function": {"name": "f"}}, [TOOL], {"name": "f"}),
        ("required", None, None),
        ({"type": "function", "function": {"name": "g"}}, [TOOL], None),
    ],
)
def test_the_choice_of_tools(choice: Any, tools: Any, found: Any) -> None:
    if found is None:
        with refused("tool_choice"):
            read(tool_choice=choice, tools=tools)
    else:
        assert read(tool_choice=choice, tools=tools).tool_choice == found
