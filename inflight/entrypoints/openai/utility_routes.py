"""The endpoints that do not generate text: models and tokens."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.offered_tools import places_of_functions
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.rendering import render_messages
from inflight.entrypoints.http.respond import ERRORS, add_post, in_time
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.openai.bodies import DetokenizedText, ModelCard, ModelList, TokenizerInfo, Tokens
from inflight.entrypoints.openai.chat import read_prompt
from inflight.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest


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
            "input_modalities": ["text", "image"] if model.takes_images else ["text"],
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
            prompt, names = await asyncio.to_thread(read_prompt, body, server.new_images())
            left_out += names
            return (await render_messages(server, prompt, behind=True)).token_ids
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "documents"):
            if getattr(body, name) is not None:
                raise FieldError(name, f"{name} needs messages, and this request has a prompt: leave it out")
        return await engine.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, behind=True)

    def present(tokens: list[int], with_strings: bool) -> bytes:
        answer: Tokens = {"count": len(tokens), "max_model_len": engine.model.max_model_len, "tokens": tokens}
        if with_strings and engine.tokenizer is not None:
            answer["token_strs"] = [engine.tokenizer.id_to_piece(token) or "" for token in tokens]
        return to_json(answer)

    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        server.check_model(body.model)
        prompt = "prompt" if body.messages is None else "messages"

        async def make() -> tuple[bytes, list[str]]:
            left_out: list[str] = []
            tokens = await tokens_of(body, left_out)
            return await asyncio.to_thread(present, tokens, bool(body.return_token_strs)), left_out

        return in_time(
            server, request, body, make, FieldNames(body, prompt=prompt, functions=places_of_functions(body.tools))
        )

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

        return in_time(server, request, body, make, FieldNames(body, prompt="tokens"))

    add_post(app, "/tokenize", tokenize, {"model": Tokens})
    add_post(app, "/detokenize", detokenize, {"model": DetokenizedText})
