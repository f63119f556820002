"""Turns requests to /api/chat and /api/generate into the chat or the completion that means the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.entrypoints.ollama.protocol import AnswerRequest, ChatRequest, GenerateRequest, OllamaMessage, Options
from inflight.entrypoints.ollama.results import RESULT, name_calls
from inflight.entrypoints.openai.chat import validate_chat
from inflight.entrypoints.openai.completions import validate_completion
from inflight.entrypoints.openai.constraint_fields import ConstraintFields, Constraints
from inflight.entrypoints.openai.content_parts import check_medium, text_instead
from inflight.entrypoints.openai.errors import ApiError
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.openai.server import ApiServer
from inflight.entrypoints.openai.validated import ValidatedRequest

_LATEST = ":latest"
_IMAGE = "image"
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
    if isinstance(body, GenerateRequest) and body.images:
        check_medium(_IMAGE, "images")
    left_out: list[str] = []
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
        chat = await asyncio.to_thread(lambda: ChatCompletionRequest(**given, **_conversation(body, left_out)))
        validated = await validate_chat(server, chat)
    return replace(
        validated,
        presentation=replace(validated.presentation, model=body.model or given["model"]),
        left_out=(*left_out, *validated.left_out),
    )


def _common(body: AnswerRequest, max_model_len: int) -> dict[str, Any]:
    names = Options.model_fields.keys() - Constraints.model_fields.keys()
    options = {} if body.options is None else {name: getattr(body.options, name) for name in names}
    given: dict[str, Any] = {_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    if given.get("max_tokens", 1) < 1:
        given["max_tokens"] = max_model_len  # it is cut to the room in the context
    given |= {name: getattr(body, name) for name in ConstraintFields.model_fields}  # also those in `options`
    return {**given, "stream": body.stream is not False}


def _conversation(body: AnswerRequest, left_out: list[str]) -> dict[str, Any]:
    """The fields of a chat that completions do not have. `left_out` gets the names of the fields that the model does not see,
    for the answer's header.

    Raises:
        FieldError: the client asks about images.
    """
    fields: dict[str, Any] = {}
    if isinstance(body, ChatRequest):
        return {**fields, "messages": _messages(body.messages or (), left_out), "tools": body.tools or None}
    assert isinstance(body, GenerateRequest)
    texts = {"system": body.system, "user": body.prompt}
    return {**fields, "messages": [{"role": role, "content": text} for role, text in texts.items() if text]}


def _messages(messages: Sequence[OllamaMessage], left_out: list[str]) -> list[dict[str, Any]]:
    """In Ollama's API calls may have no ids. Some chat templates need ids, so calls without an id get one. It depends only on
    the call's place, because the prompt's beginning must stay the same."""
    found: list[dict[str, Any]] = []
    num_calls = 0
    num_answered = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    for i, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.images:
            if i >= num_answered and message.role != RESULT:
                check_medium(_IMAGE, f"messages[{i}].images")
            made["content"] = "\n".join(filter(None, (message.content, text_instead(_IMAGE))))
            left_out.append("messages[].images")
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                call_id = call.id or f"call{num_calls:05}"  # nine characters, as Mistral's templates want it
                calls.append({**call.model_dump(exclude_none=True), "id": call_id})
                num_calls += 1
            made["tool_calls"] = calls
        if message.role == RESULT:
            made |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
        found.append(made)
    name_calls(found)
    return found
