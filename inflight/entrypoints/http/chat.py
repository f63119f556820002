"""Checks, renders and tokenises a `ChatRequest` into a `ValidatedRequest`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from inflight.entrypoints.http.chat_request import ChatRequest, Json
from inflight.entrypoints.http.rendering import render_messages, truncated
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.interface.request import AnswerFrame
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.reasoning import Opening, answer_frame, find_opening
from inflight.parsers.selector import call_beginnings, create_output_parser, reasoning_markup
from inflight.parsers.tool_choice import constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import JSON_CONSTRAINTS

_REASONING_TAIL = 16  # tokens at the end of the prompt: a tag in them may switch the reasoning on or off


async def validate_chat(server: ApiServer, read: Callable[[], ChatRequest]) -> ValidatedRequest:
    """Check, render and tokenise a chat. No generation is started.

    Args:
        read: makes the request from the body of an API. It is called in a thread, because a body may have megabytes.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
        TokenizerError: the model has no chat template.
    """
    chat, params = await asyncio.to_thread(_read, server, read)
    params, ignored = chat.thoughts.bound(params, server.parsers, writes_efforts=server.writes_efforts)
    tools = chat.prompt.tools
    listed = [tool for tool in tools if tool["function"]["name"] not in chat.hidden_tools]
    # those for an effort, which the templates of gpt-oss and Qwen read; the request's own come first
    variables = {**chat.thoughts.template_variables, **chat.prompt.variables}
    shown = replace(chat.prompt, tools=listed, variables=variables)
    prompt = await render_messages(server, shown, cache_salt=chat.cache_salt)
    prompt = truncated(prompt, chat.truncate_prompt_tokens, server.engine.model.max_model_len)
    default = server.engine.default_max_tokens
    if params.max_tokens is None and default is not None:
        # As in vLLM, max_tokens of generation_config.json is the default. Without it an answer may fill the context.
        params = replace(params, max_tokens=default)
    make_parser, frame = await _reading(server, chat, prompt.token_ids, params)
    if make_parser is not None and make_parser().needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return ValidatedRequest(
        prompts=(prompt,),
        params=params,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
        thinks_first=not chat.prompt.continue_final_message,
        answer_frame=frame,
        make_parser=make_parser,
        presentation=chat.presentation,
        left_out=(*chat.left_out, *ignored, *(server.tool_support.report() if tools else ())),
    )


def _read(server: ApiServer, read: Callable[[], ChatRequest]) -> tuple[ChatRequest, SamplingParams]:
    """Returns the request, whose prompt has tools only if they may be called, and its parameters with the constraint of the
    tools."""
    chat = read()
    if not chat.prompt.tools or chat.tool_choice == "none":
        return replace(chat, prompt=replace(chat.prompt, tools=())), chat.params
    params = constrain_tools(
        chat.params,
        chat.prompt.tools,
        chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        markup=server.parsers.markup,
    )
    return chat, params


def _text_of(message: Json) -> str:
    """The text of the content."""
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if part["type"] == "text")
    )


async def _reading(
    server: ApiServer, chat: ChatRequest, token_ids: list[int], params: SamplingParams
) -> tuple[Callable[[], OutputParser] | None, AnswerFrame | None]:
    """Returns a function that makes a parser for the text of one choice, and the frame of the text. The first is None if the
    model's text needs no parser, because it is all content."""
    tools = chat.prompt.tools or None
    tool_parser = server.parsers.tool if tools else None
    reasoning_parser = server.parsers.reasoning
    if tool_parser is None and reasoning_parser is None:
        return None, None
    markup = reasoning_markup(reasoning_parser)
    opening = Opening.NONE
    if markup is not None:
        prompt_end = await server.engine.decode(token_ids[-_REASONING_TAIL:])
        begun = _text_of(chat.prompt.messages[-1]) if chat.prompt.continue_final_message else None
        opening = find_opening(markup, prompt_end, begun)
    constraint = params.structured_outputs
    only_calls = bool(tools) and chat.tool_choice != "auto"
    keeps_blanks = False
    if constraint is None:
        frame = answer_frame(markup, opening, call_beginnings(tool_parser) if tools else (), is_constrained=False)
    else:
        # without a grammar for calls, a call may still come instead of JSON
        may_call = chat.tool_choice == "auto" and constraint.constraint in ("json", "json_object")
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
        max_tool_calls=None if chat.parallel_tool_calls else 1,
    )
    return make_parser, frame
