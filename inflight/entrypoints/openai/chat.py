"""POST /v1/chat/completions: reads a `ChatCompletionRequest` as a `ChatRequest`."""

from dataclasses import replace

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.fields.offered_tools import (
    keep_functions,
    neutral_choice,
    places_of_functions,
    plain_tools,
    tool_choice_of,
)
from inflight.entrypoints.fields.readable_history import make_readable
from inflight.entrypoints.http.chat_request import ChatPrompt, ChatRequest
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.thinking import thoughts_of
from inflight.entrypoints.openai.older_fields import use_newer_fields
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, ChatTemplateFields
from inflight.entrypoints.written_answer import REASONING_FIELDS
from inflight.sampling_params import SamplingParams


def read_chat(server: ApiServer, body: ChatCompletionRequest) -> ChatRequest:
    """
    Raises:
        ApiError, InvalidRequestError: the request is wrong.
    """
    model = server.check_model(body.model)
    body.check_stream()
    images = server.new_images()
    messages, left_out = make_readable(body.messages, images)
    body.tools, others = keep_functions(body.tools)
    use_newer_fields(body)
    tools = plain_tools(body.tools)
    field = "tool_choice" if body.function_call is None else "function_call"
    tool_choice = tool_choice_of(tools, neutral_choice(body.tool_choice), others, field)
    thoughts = thoughts_of(body)
    return ChatRequest(
        prompt=replace(prompt_of(body), messages=template_messages(messages), images=images.sources, tools=tools),
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        params=_sampling_params(server, body),
        thoughts=thoughts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        presentation=replace(
            body.presentation(model, force_usage=server.settings.enable_force_include_usage),
            timings_per_token=bool(body.timings_per_token),
            return_progress=bool(body.return_progress),
            has_older_calls=bool(body.functions),
            reasoning=not body.hides_reasoning,
            reasoning_fields=() if body.hides_reasoning else REASONING_FIELDS[server.settings.reasoning_field],
        ),
        left_out=(*left_out, *others),
    )


def chat_names(body: ChatCompletionRequest) -> FieldNames:
    """How the request calls the parameters of the `ChatRequest`, before it is read."""
    older = [f"functions[{i}]" for i in range(len(body.functions or ()))]
    return FieldNames(body, functions=places_of_functions(body.tools) or older)


def read_prompt(body: ChatTemplateFields, images: RequestImages) -> tuple[ChatPrompt, list[str]]:
    """The prompt of a chat that is not answered, and the names of what is left out of it. `images` gets the images.

    Raises:
        FieldError: the client asks about a medium, or a message has no content.
    """
    messages, left_out = make_readable(body.messages or (), images)
    tools, others = keep_functions(body.tools)
    shown = template_messages(messages)
    prompt = replace(prompt_of(body), messages=shown, images=images.sources, tools=plain_tools(tools))
    return prompt, [*left_out, *others]


def prompt_of(body: ChatTemplateFields) -> ChatPrompt:
    """What the request says about the template, without messages and tools."""
    return ChatPrompt(
        messages=(),
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs or {},
        processor_options=body.mm_processor_kwargs or {},
    )


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
    )
