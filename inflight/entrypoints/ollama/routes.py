"""The endpoints of Ollama's API: /api/chat, /api/generate, and those that describe the one model that is served."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.fields.offered_tools import places_of_functions
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import add_post, error_responses, respond
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.text_prompts import find_fim_tokens
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.ollama import bodies
from inflight.entrypoints.ollama.api import API_VERSION
from inflight.entrypoints.ollama.embeddings import add_embedding_routes
from inflight.entrypoints.ollama.presenter import (
    OllamaChatPresenter,
    OllamaPresenter,
    OllamaTextPresenter,
    Piece,
    head_of,
)
from inflight.entrypoints.ollama.protocol import AnswerRequest, ChatRequest, GenerateRequest, PullRequest, ShowRequest
from inflight.entrypoints.ollama.translation import served_name, validate_answer

_NEVER = "9999-12-31T23:59:59Z"  # the model always stays loaded
_TEXTS = dict[str, str]  # the type of {"error": text} and of {"status": text}
_ERRORS = error_responses(_TEXTS, "503")


def add_routes(app: FastAPI, server: ApiServer) -> None:
    _add_generation_routes(app, server)
    _add_description_routes(app, server)


def _add_generation_routes(app: FastAPI, server: ApiServer) -> None:
    """Add the endpoints that generate text, and `pull`."""

    def answer(body: AnswerRequest, request: Request, presenter: type[OllamaPresenter], *, is_empty: bool) -> Response:
        if not is_empty:
            names = FieldNames(body, prompt="prompt")
            if isinstance(body, ChatRequest):
                names = FieldNames(body, functions=places_of_functions(body.tools))
            return respond(server, request, body, partial(validate_answer, server, body), presenter, names)
        known = served_name(server, body.model)
        headers = server.ignored_fields.header(server.ignored_fields.take_out(body))
        line = presenter.line(head_of(body.model or known), Piece(), done_reason="load")
        return Response(line, headers=headers, media_type="application/json")

    async def chat(body: ChatRequest, request: Request) -> Response:
        return answer(body, request, OllamaChatPresenter, is_empty=not body.messages)

    async def generate(body: GenerateRequest, request: Request) -> Response:
        return answer(body, request, OllamaTextPresenter, is_empty=not (body.prompt or body.suffix or body.images))

    async def pull(body: PullRequest) -> Response:
        """Succeeds at once for the served model: nothing is downloaded."""
        headers = server.ignored_fields.header(server.ignored_fields.take_out(body))
        served_name(server, body.model or body.name)
        states = ["success"] if body.stream is False else ["pulling manifest", "success"]
        lines = b"".join(to_json({"status": state}) + b"\n" for state in states)
        kind = "application/json" if body.stream is False else OllamaPresenter.media_type
        return Response(lines, headers=headers, media_type=kind)

    lines: dict[str, Any] = {
        "description": "A line of JSON for each piece.",
        "content": {OllamaPresenter.media_type: {}},
    }
    add_post(app, "/api/chat", chat, {"model": bodies.ChatAnswer, **lines}, _ERRORS)
    add_post(app, "/api/generate", generate, {"model": bodies.GeneratedText, **lines}, _ERRORS)
    add_post(app, "/api/pull", pull, {"model": _TEXTS, **lines}, _ERRORS)
    add_embedding_routes(app, server, _ERRORS)


def _add_description_routes(app: FastAPI, server: ApiServer) -> None:
    """Add the endpoints that describe the one model that is served."""
    model = server.engine.model
    engine = server.engine
    modified_at = datetime.fromtimestamp(server.created, UTC).isoformat()
    family = model.architecture.name.removesuffix("ForCausalLM").lower()
    details: bodies.ModelDetails = {
        "parent_model": "",
        "format": "gguf" if model.load_format == "gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": model.dtype,
    }

    def entry(name: str) -> bodies.ModelEntry:
        return {
            "name": name,
            "model": name,
            "modified_at": modified_at,
            "size": model.num_bytes,
            "digest": hashlib.sha256(server.fingerprint.encode("ascii")).hexdigest(),
            "details": details,
        }

    async def show(body: ShowRequest, response: Response) -> bodies.ShownModel:
        response.headers.update(server.ignored_fields.header(server.ignored_fields.take_out(body)))
        name = served_name(server, body.model or body.name)
        can_insert = engine.tokenizer is not None and find_fim_tokens(engine.tokenizer) is not None
        capabilities = {"tools": server.parsers.tool, "thinking": server.parsers.reasoning, "insert": can_insert}
        capabilities["vision"] = model.takes_images
        architecture = model.architecture
        return {
            "modelfile": "",
            "parameters": "",
            "template": (engine.chat_template and engine.chat_template.default_source) or "",
            "details": details,
            "model_info": {
                "general.architecture": family,
                "general.basename": name,
                f"{family}.context_length": model.max_model_len,
                f"{family}.embedding_length": architecture.hidden_size,
                f"{family}.block_count": architecture.num_layers,
                f"{family}.vocab_size": model.vocab_size,
            },
            "capabilities": ["completion", *(name for name, has in capabilities.items() if has)],
            "modified_at": modified_at,
        }

    async def root() -> Response:
        """Some clients look for this text before they ask for anything else."""
        return Response("Ollama is running", media_type="text/plain")

    async def version() -> dict[str, str]:
        return {"version": API_VERSION}

    async def tags() -> bodies.Models:
        return {"models": [entry(name) for name in server.model_names]}

    async def running() -> bodies.RunningModels:
        shown: list[Any] = [entry(name) for name in server.model_names]
        for each in shown:
            each |= {"expires_at": _NEVER, "size_vram": model.num_bytes, "context_length": model.max_model_len}
        return {"models": shown}

    app.add_api_route("/api/show", show, methods=["POST"], responses=_ERRORS)
    for path, described in (("version", version), ("tags", tags), ("ps", running)):
        app.add_api_route(f"/api/{path}", described, methods=["GET"], responses=_ERRORS)
    app.add_api_route("/", root, methods=["GET"], include_in_schema=False)
