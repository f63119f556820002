"""A made-up API in one file: POST /made-up/say. Its row for the table of APIs is `API`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import FastAPI, Request, Response
from pydantic import Field

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.messages import chat_message
from inflight.entrypoints.fields.parameters import sampling_params
from inflight.entrypoints.fields.sampling_fields import SamplingFields
from inflight.entrypoints.fields.strict_model import optional
from inflight.entrypoints.http.api import Api
from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.chat_request import ChatPrompt, ChatRequest
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.presenter import Presenter, events_of
from inflight.entrypoints.http.respond import add_post, respond
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.validated import Presentation
from inflight.entrypoints.json_lines import to_json
from inflight.interface.events import ContentDelta
from inflight.outputs import RequestOutput


class Say(ConstraintFields, SamplingFields):
    """The body of a request."""

    say: str = Field(description="What the user says.")
    most: int | None = optional("The most tokens of the answer.", ge=1)
    live: bool | None = optional("A line for each piece.")


def error_form(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    return {"oops": message, "at": param}


API = Api(
    routes="tests.architecture.made_up_api",
    title="Made up",
    base_path="/made-up",
    paths=("/made-up/",),
    error_form=error_form,
    instead={"/made-up/sing": ": use /made-up/say"},
)


class SayPresenter(Presenter):
    id_prefix = "say"
    media_type = "application/x-ndjson"

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        return [to_json({"said": text}) + b"\n"] if (text := _text(output)) else []

    def end(self) -> bytes:
        return to_json({"over": True}) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return error.body(error_form) + b"\n"

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        return to_json({"said": "".join(map(_text, outputs))})


def _text(output: RequestOutput) -> str:
    events = events_of(output.outputs[0], with_reasoning=False)
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def read_say(server: ApiServer, body: Say) -> ChatRequest:
    return ChatRequest(
        prompt=ChatPrompt(messages=[chat_message("user", body.say)]),
        params=sampling_params(body, server.engine.default_params, max_tokens=body.most),
        presentation=Presentation(model=server.model_names[0], stream=bool(body.live)),
    )


def add_routes(app: FastAPI, server: ApiServer) -> None:
    async def say(body: Say, request: Request) -> Response:
        validate = partial(validate_chat, server, partial(read_say, server, body))
        return respond(server, request, body, validate, SayPresenter, FieldNames(body, prompt="say"))

    add_post(app, "/made-up/say", say, {"description": "What the model says."})
