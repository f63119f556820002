"""Reads requests to /api/chat and /api/generate as a `ChatRequest` or a `TextRequest`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from inflight.entrypoints.fields.constraint_fields import Constraints
from inflight.entrypoints.fields.content_parts import TextPart, check_medium, text_instead
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import PlacedImage, RequestImages
from inflight.entrypoints.fields.messages import ChatMessage, template_messages
from inflight.entrypoints.fields.offered_tools import keep_functions, plain_tools, tool_choice_of
from inflight.entrypoints.fields.parameters import sampling_params
from inflight.entrypoints.fields.readable_history import make_readable
from inflight.entrypoints.fields.thinking_fields import unread_variables
from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.chat_request import ChatPrompt, ChatRequest, TextRequest
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.text_prompts import validate_text
from inflight.entrypoints.http.thinking import thoughts_of
from inflight.entrypoints.http.validated import Presentation, ValidatedRequest
from inflight.entrypoints.ollama.protocol import AnswerRequest, GenerateRequest, OllamaMessage, Options
from inflight.entrypoints.ollama.protocol import ChatRequest as ChatRequestBody
from inflight.entrypoints.ollama.results import RESULT, name_calls
from inflight.sampling_params import SamplingParams

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
    if isinstance(body, GenerateRequest) and (body.raw or body.suffix):
        return await validate_text(server, read_text(server, body))
    return await validate_chat(server, partial(read_chat, server, body))


def read_text(server: ApiServer, body: GenerateRequest) -> TextRequest:
    model = served_name(server, body.model)
    why = "raw" if body.raw else "suffix"
    if body.system:
        raise ApiError(400, f"system: the chat template writes it, and {why} goes without the template; leave it out")
    if body.images:
        if not (images := server.new_images()).are_read:
            check_medium(_IMAGE, "images", images)
        message = f"images: the chat template writes them, and {why} goes without the template; leave them out"
        raise FieldError("images", message)
    thoughts = thoughts_of(body)
    return TextRequest(
        prompts=(body.prompt or "",),
        suffix=body.suffix or "",
        params=_sampling_params(server, body, default_max_tokens=server.engine.model.max_model_len),
        thoughts=thoughts,
        presentation=_presentation(body, model),
        left_out=unread_variables(body.chat_template_kwargs),
    )


def read_chat(server: ApiServer, body: AnswerRequest) -> ChatRequest:
    """
    Raises:
        FieldError: the client asks about images, and the model takes none.
        ApiError, InvalidRequestError: the request is wrong.
    """
    model = served_name(server, body.model)
    left_out: list[str] = []
    images = server.new_images()
    given = _conversation(body, left_out, images)
    messages, unread = make_readable(list(given.values()), images)
    functions, others = keep_functions(body.tools if isinstance(body, ChatRequestBody) else None)
    tools = plain_tools(functions)
    thoughts = thoughts_of(body)
    return ChatRequest(
        prompt=ChatPrompt(
            messages=template_messages(messages),
            places=list(given),
            images=images.sources,
            tools=tools,
            variables=body.chat_template_kwargs or {},
        ),
        tool_choice=tool_choice_of(tools, None),
        params=_sampling_params(server, body, default_max_tokens=None),
        thoughts=thoughts,
        presentation=replace(_presentation(body, model), reasoning=not body.hides_reasoning),
        left_out=(*left_out, *unread, *others),
    )


def _sampling_params(server: ApiServer, body: AnswerRequest, *, default_max_tokens: int | None) -> SamplingParams:
    """The options that draw the tokens are in `options`; the constraints may also be beside it."""
    names = Options.model_fields.keys() - Constraints.model_fields.keys()
    options = {} if body.options is None else {name: getattr(body.options, name) for name in names}
    set_options = {name: value for name, value in options.items() if value is not None}
    given: dict[str, Any] = {_NAMES.get(name, name): value for name, value in set_options.items()}
    max_tokens = given.pop("max_tokens", default_max_tokens)
    if max_tokens is not None and max_tokens < 1:
        max_tokens = server.engine.model.max_model_len  # it is cut to the room in the context
    return sampling_params(body, server.engine.default_params, max_tokens=max_tokens, **given)


def _presentation(body: AnswerRequest, model: str) -> Presentation:
    return Presentation(model=body.model or model, stream=body.stream is not False)


def _conversation(body: AnswerRequest, left_out: list[str], images: RequestImages) -> dict[str, ChatMessage]:
    """The messages by the fields of the request that have them. `left_out` gets the names of the fields that the model does not
    see, for the answer's header.

    Raises:
        FieldError: the client asks about images, and the model takes none.
    """
    if isinstance(body, ChatRequestBody):
        read = _messages(body.messages or (), left_out, images)
        found = {f"messages[{i}]": message for i, message in enumerate(read)}
    else:
        assert isinstance(body, GenerateRequest)
        question = _with_images(body.prompt or "", body.images, "images", images, is_asked=True)
        texts = (("system", "system", body.system), ("prompt", "user", question))
        found = {field: {"role": role, "content": text} for field, role, text in texts if text}
    return {field: ChatMessage.model_validate(message) for field, message in found.items()}


def _with_images(
    text: str | None, given: Sequence[str] | None, where: str, images: RequestImages, *, is_asked: bool
) -> str | list[TextPart | PlacedImage] | None:
    """The content of a message with these images, which come before its text.

    Raises:
        FieldError: the client asks about images, and the model takes none.
    """
    if not given:
        return text
    if images.are_read:
        placed = [images.add_base64(each, f"{where}[{i}]") for i, each in enumerate(given)]
        return [*placed, *([TextPart(type="text", text=text)] if text else ())]
    if is_asked:
        check_medium(_IMAGE, where, images)
    return "\n".join(filter(None, (text, text_instead(_IMAGE, images))))


def _messages(messages: Sequence[OllamaMessage], left_out: list[str], images: RequestImages) -> list[dict[str, Any]]:
    """In Ollama's API calls may have no ids. Some chat templates need ids, so calls without an id get one. It depends only on
    the call's place, because the prompt's beginning must stay the same."""
    found: list[dict[str, Any]] = []
    num_calls = 0
    num_answered = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    for i, message in enumerate(messages):
        is_asked = i >= num_answered and message.role != RESULT
        content = _with_images(message.content, message.images, f"messages[{i}].images", images, is_asked=is_asked)
        made: dict[str, Any] = {"role": message.role, "content": content}
        if message.images and not images.are_read:
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
