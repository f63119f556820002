"""Turns requests to /api/chat and /api/generate into the chat or the completion that means the same."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.entrypoints.ollama.protocol import AnswerRequest, ChatRequest, GenerateRequest, OllamaMessage
from inflight.entrypoints.openai.chat import validate_chat
from inflight.entrypoints.openai.completions import validate_completion
from inflight.entrypoints.openai.errors import ApiError
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.thinking import Thoughts
from inflight.entrypoints.openai.validated import ValidatedRequest

_LATEST = ":latest"
_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}  # options with another name in a chat


def served_name(server: ApiServer, name: str | None) -> str:
    """Returns the name of a served model as /api/tags lists it. ":latest" may be added to a name, or left out.

    Raises:
        ApiError: there is no such model. The status is 404.
    """
    same = [] if name is None else [name, name + _LATEST, name.removesuffix(_LATEST)]
    return server.check_model(next((each for each in same if each in server.model_names), name))


async def validate_answer(server: ApiServer, body: AnswerRequest) -> ValidatedRequest:
    """Check, render and tokenise a request. No generation is started.

    Raises:
        ApiError, InvalidRequestError: the request is wrong.
        TokenizerError: the model has no chat template.
    """
    given = {"model": served_name(server, body.model), **_common(body, server.engine.model.max_model_len)}
    if isinstance(body, GenerateRequest) and (body.raw or body.suffix):
        if body.system:
            why = "raw" if body.raw else "suffix"
            raise ApiError(
                400, f"system: the chat template writes it, and {why} goes without the template; leave it out"
            )
        room = server.engine.model.max_model_len
        asked = CompletionRequest(prompt=body.prompt or "", suffix=body.suffix, **{"max_tokens": room, **given})
        validated = await validate_completion(server, asked)
    else:
        # in a thread, because there may be thousands of messages
        chat = await asyncio.to_thread(lambda: ChatCompletionRequest(**given, **_conversation(body)))
        validated = await validate_chat(server, chat, thoughts=_thoughts(body))
    return replace(validated, presentation=replace(validated.presentation, model=body.model or given["model"]))


def _common(body: AnswerRequest, max_model_len: int) -> dict[str, Any]:
    options = body.options.model_dump(exclude_none=True) if body.options is not None else {}
    given: dict[str, Any] = {_NAMES.get(name, name): value for name, value in options.items()}
    if given.get("max_tokens", 1) < 1:
        given["max_tokens"] = max_model_len  # it is cut to the room in the context
    return {**given, "format": body.format or None, "stream": body.stream is not False}


def _thoughts(body: AnswerRequest) -> Thoughts:
    effort = body.think if isinstance(body.think, str) else None
    is_on = None if body.think is None else body.think is not False
    return Thoughts(effort=effort, is_on=is_on, effort_field="think")


def _conversation(body: AnswerRequest) -> dict[str, Any]:
    """The fields of a chat that completions do not have."""
    fields: dict[str, Any] = {}
    if isinstance(body, ChatRequest):
        return {**fields, "messages": _messages(body.messages or ()), "tools": body.tools or None}
    assert isinstance(body, GenerateRequest)
    texts = {"system": body.system, "user": body.prompt}
    return {**fields, "messages": [{"role": role, "content": text} for role, text in texts.items() if text]}


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """In Ollama's API calls may have no ids, and results come in the order of the calls. Some chat templates need ids, so calls
    without an id get one. It depends only on the call's place, because the prompt's beginning must stay the same."""
    found: list[dict[str, Any]] = []
    waiting: deque[str] = deque()  # the calls whose results have not come yet
    num_calls = 0
    for message in messages:
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                waiting.append(call.id or f"call{num_calls:05}")  # nine characters, as Mistral's templates want it
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": waiting[-1], "type": "function", "function": function})
                num_calls += 1
            made["tool_calls"] = calls
        if message.role == "tool":
            next_call = waiting.popleft() if waiting else None
            made |= {"tool_call_id": message.tool_call_id or next_call, "name": message.tool_name}
        found.append(made)
    return found
