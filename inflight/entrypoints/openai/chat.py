"""POST /v1/chat/completions: checks, renders and tokenises a `ChatCompletionRequest` into a `ValidatedRequest`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.offered_tools import keep_functions, tool_choice_of, use_newer_fields
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.openai.readable_history import make_readable
from inflight.entrypoints.openai.rendering import plain_tools, render_messages
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.thinking import Thoughts, thoughts_of
from inflight.entrypoints.openai.validated import TokenPrompt, ValidatedRequest
from inflight.entrypoints.written_answer import REASONING_FIELDS
from inflight.interface.request import AnswerFrame
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.reasoning import Opening, answer_frame, find_opening
from inflight.parsers.selector import call_beginnings, create_output_parser, reasoning_markup
from inflight.parsers.tool_choice import ToolChoice, constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import JSON_CONSTRAINTS

_REASONING_TAIL = 16  # tokens at the end of the prompt: a tag in them may switch the reasoning on or off


async def validate_chat(
    server: ApiServer,
    body: ChatCompletionRequest,
    *,
    hidden_tools: frozenset[str] = frozenset(),
    thoughts: Thoughts | None = None,
) -> ValidatedRequest:
    """Check, render and tokenise a chat request. No generation is started.

    Args:
        hidden_tools: names of tools that the template does not list, because the messages describe them.
        thoughts: what the request of another API says about thinking. Default: what the fields of `body` say.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    model = server.check_model(body.model)
    body.check_stream()
    left_out = make_readable(body)
    tools_left_out = keep_functions(body)
    use_newer_fields(body)
    tool_choice = tool_choice_of(body, tools_left_out)
    thoughts = thoughts_of(body) if thoughts is None else thoughts
    params, tools = await asyncio.to_thread(_constrain, server, body, tool_choice)
    params, ignored = thoughts.bound(params, server.parsers, writes_efforts=server.writes_efforts)
    listed = [tool for tool in tools or () if tool["function"]["name"] not in hidden_tools]
    token_ids = await render_messages(server, body, listed or None, _template_kwargs(body, thoughts))
    token_ids = body.truncate_prompt(token_ids, server.engine.model.max_model_len)
    default = server.engine.default_max_tokens
    if params.max_tokens is None and default is not None:
        # As in vLLM, max_tokens of generation_config.json is the default. Without it an answer may fill the context.
        params = replace(params, max_tokens=default)
    make_parser, frame = await _reading(server, body, tools, token_ids, params)
    if make_parser is not None and make_parser().needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return ValidatedRequest(
        prompts=(TokenPrompt(token_ids, None),),
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        thinks_first=not body.continue_final_message,
        answer_frame=frame,
        make_parser=make_parser,
        presentation=replace(
            body.presentation(model, force_usage=server.settings.enable_force_include_usage),
            has_older_calls=bool(body.functions),
            reasoning=not body.hides_reasoning,
            reasoning_fields=() if body.hides_reasoning else REASONING_FIELDS[server.settings.reasoning_field],
        ),
        left_out=(*left_out, *tools_left_out, *ignored, *(server.tool_support.report() if tools else ())),
    )


def _constrain(
    server: ApiServer, body: ChatCompletionRequest, tool_choice: ToolChoice
) -> tuple[SamplingParams, list[dict[str, Any]] | None]:
    """Returns the sampling parameters, and the tools as JSON objects or None. Call it in a thread, because the schemas of tools
    may have megabytes."""
    tools = None if tool_choice == "none" else plain_tools(body.tools)
    params = _sampling_params(server, body)
    if tools:
        params = constrain_tools(
            params,
            tools,
            tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            markup=server.parsers.markup,
        )
    return params, tools


def _sampling_params(server: ApiServer, body: ChatCompletionRequest) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most: int | None = getattr(body, name)
    if most == 0:
        raise FieldError(name, f"{name}=0 leaves no answer: give at least 1, or -1 for the whole context")
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs: set logprobs to true")
    return body.sampling_params(
        server.engine.default_params,
        max_tokens=server.engine.model.max_model_len if most == -1 else most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _template_kwargs(body: ChatCompletionRequest, thoughts: Thoughts) -> dict[str, Any]:
    """The variables for the template: the request's chat_template_kwargs, and those that the templates of gpt-oss and Qwen read
    for an effort. If both set a variable, chat_template_kwargs has precedence."""
    return {**thoughts.template_variables, **(body.chat_template_kwargs or {})}


async def _reading(
    server: ApiServer,
    body: ChatCompletionRequest,
    tools: list[dict[str, Any]] | None,
    token_ids: list[int],
    params: SamplingParams,
) -> tuple[Callable[[], OutputParser] | None, AnswerFrame | None]:
    """Returns a function that makes a parser for the text of one choice, and the frame of the text. The first is None if the
    model's text needs no parser, because it is all content."""
    tool_parser = server.parsers.tool if tools else None
    reasoning_parser = server.parsers.reasoning
    if tool_parser is None and reasoning_parser is None:
        return None, None
    markup, opening = reasoning_markup(reasoning_parser), Opening.NONE
    if markup is not None:
        prompt_end = await server.engine.decode(token_ids[-_REASONING_TAIL:])
        begun = body.messages[-1].text if body.messages and body.continue_final_message else None
        opening = find_opening(markup, prompt_end, begun)
    constraint = params.structured_outputs
    only_calls = bool(tools) and body.tool_choice not in (None, "none", "auto")
    keeps_blanks = False
    if constraint is None:
        frame = answer_frame(markup, opening, is_constrained=False)
    else:
        # without a grammar for calls, a call may still come instead of JSON
        may_call = body.tool_choice in (None, "auto") and constraint.constraint in ("json", "json_object")
        frame = answer_frame(markup, opening, call_beginnings(tool_parser) if may_call else (), only_calls=only_calls)
        keeps_blanks = constraint.constraint not in JSON_CONSTRAINTS  # JSON may begin with any white space
    make_parser = partial(
        create_output_parser,
        tool_parser,
        reasoning_parser,
        tools=tools,
        opening=opening,
        is_constrained=constraint is not None,
        keeps_blanks=keeps_blanks,
        only_calls=only_calls,
        max_tool_calls=1 if body.parallel_tool_calls is False else None,
    )
    return make_parser, frame
