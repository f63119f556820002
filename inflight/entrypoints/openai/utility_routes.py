"""The endpoints that do not generate text: models, tokens, version, health, faults, metrics, the prefix cache."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response

import inflight
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.openai.errors import ApiError, FieldError
from inflight.entrypoints.openai.generation_routes import ERRORS, add_post, in_time
from inflight.entrypoints.openai.offered_tools import keep_functions
from inflight.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from inflight.entrypoints.openai.readable_history import make_readable
from inflight.entrypoints.openai.rendering import plain_tools, render_messages
from inflight.entrypoints.openai.responses import (
    DetokenizedText,
    ModelCard,
    ModelList,
    Readiness,
    Status,
    TokenizerInfo,
    Tokens,
    Version,
)
from inflight.entrypoints.openai.server import ApiServer
from inflight.errors import EngineError, EngineRecoveringError
from inflight.interface.statistics import FaultStatus


def add_model_routes(app: FastAPI, server: ApiServer) -> None:
    created_at = datetime.fromtimestamp(server.created, UTC).isoformat()

    def card(name: str) -> ModelCard:
        model = server.engine.model
        return {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "inflight",
            "root": model.name,
            "max_model_len": model.max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": created_at,
            "lifecycle": "active",
            "max_input_tokens": model.max_model_len,
            "max_tokens": model.max_model_len,
        }

    async def list_models() -> ModelList:
        names = server.model_names
        cards = [card(name) for name in names]
        return {"object": "list", "data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    async def retrieve_model(model: str) -> ModelCard:
        return card(server.check_model(model))

    async def tokenizer_info() -> TokenizerInfo:
        """Special tokens, chat template and length, for clients that render chats and tokenise prompts themselves."""
        if server.engine.tokenizer is None:
            raise ApiError(404, "this server runs without a tokenizer", code="not_found")
        template = None if server.engine.chat_template is None else server.engine.chat_template.default_source
        tokens = server.engine.tokenizer.special_tokens
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens.get("bos_token"),
            "eos_token": tokens.get("eos_token"),
            "pad_token": tokens.get("pad_token"),
            "unk_token": tokens.get("unk_token"),
            "chat_template": template,
            "model_max_length": server.engine.model.max_model_len,
        }

    app.add_api_route("/v1/models", list_models, methods=["GET"], responses=ERRORS)
    # the name of a model may contain a slash, as on the hub, and only `:path` matches a slash
    app.add_api_route("/v1/models/{model:path}", retrieve_model, methods=["GET"], responses=ERRORS)
    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], responses=ERRORS)


def add_token_routes(app: FastAPI, server: ApiServer) -> None:
    engine = server.engine

    async def tokens_of(body: TokenizeRequest, left_out: list[str]) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "give either prompt or messages, and not both")
        if body.prompt is None:
            left_out += [*make_readable(body), *keep_functions(body)]
            return await render_messages(server, body, plain_tools(body.tools), body.chat_template_kwargs)
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "documents"):
            if getattr(body, name) is not None:
                raise FieldError(name, f"{name} needs messages, and this request has a prompt: leave it out")
        return await engine.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    def present(tokens: list[int], with_strings: bool) -> bytes:
        answer: Tokens = {"count": len(tokens), "max_model_len": engine.model.max_model_len, "tokens": tokens}
        if with_strings and engine.tokenizer is not None:
            answer["token_strs"] = [engine.tokenizer.id_to_piece(token) or "" for token in tokens]
        return to_json(answer)

    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        server.check_model(body.model)

        async def make() -> tuple[bytes, list[str]]:
            left_out: list[str] = []
            tokens = await tokens_of(body, left_out)
            return await asyncio.to_thread(present, tokens, bool(body.return_token_strs)), left_out

        return in_time(server, request, body, make)

    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        server.check_model(body.model)
        if len(body.tokens) > engine.model.max_model_len:
            limit = f"max_model_len={engine.model.max_model_len}"
            raise FieldError(
                "tokens", f"tokens has {len(body.tokens)} token ids, more than {limit}: send them in parts"
            )
        for i, token in enumerate(body.tokens):
            if token >= engine.model.vocab_size:
                raise FieldError(
                    f"tokens[{i}]", f"tokens[{i}]={token} is outside the vocabulary of {engine.model.vocab_size} tokens"
                )

        async def make() -> tuple[bytes, list[str]]:
            text = await engine.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
            answer: DetokenizedText = {"prompt": text}
            return to_json(answer), []

        return in_time(server, request, body, make)

    add_post(app, "/tokenize", tokenize, {"model": Tokens})
    add_post(app, "/detokenize", detokenize, {"model": DetokenizedText})


def add_operation_routes(app: FastAPI, server: ApiServer) -> None:
    engine, metrics = server.engine, server.metrics

    async def version() -> Version:
        return {"version": inflight.__version__}

    async def health() -> Status:
        """Whether the engine's process is alive."""
        await engine.check_health()
        return {"status": "healthy"}

    async def ready() -> Readiness:
        """Whether new requests are accepted and the engine makes progress with them. One of several replicas is enough."""
        if engine.is_draining:
            raise ApiError(503, "the server is shutting down", type="server_error", code="shutting_down")
        try:
            replicas = await engine.check_ready()
        except EngineRecoveringError as error:
            raise ApiError(503, str(error), type="server_error", code="engine_recovering") from error
        except EngineError as error:
            raise ApiError(503, "the engine makes no steps", type="server_error", code="not_ready") from error
        if len(replicas) == 1:
            return {"status": "ready"}
        engines = {
            str(index): "ready"
            if error is None
            else "recovering"
            if isinstance(error, EngineRecoveringError)
            else "not ready"
            for index, error in replicas.items()
        }
        return {"status": "ready", "engines": engines}

    async def fault_tolerance_status() -> FaultStatus:
        """Whether the engine recovers from a fault, and which recoveries there were."""
        return engine.fault_status

    async def reset_prefix_cache(reset_connector: bool = False) -> Status:
        """Forget the KV blocks of earlier prompts; with reset_connector=true also those in host memory and tiers."""
        await engine.reset_prefix_cache(reset_connector=reset_connector)
        return {"status": "reset"}

    for path, endpoint in (("/version", version), ("/health", health), ("/ready", ready)):
        app.add_api_route(path, endpoint, methods=["GET"], responses=ERRORS)
    app.add_api_route("/fault_tolerance/status", fault_tolerance_status, methods=["GET"], responses=ERRORS)
    # /ping is not in the OpenAPI document, because its two methods would have the same operation id there
    app.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)
    app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"], responses=ERRORS)

    async def show_metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    app.add_api_route("/metrics", show_metrics, methods=["GET"], response_class=Response, responses=ERRORS)
