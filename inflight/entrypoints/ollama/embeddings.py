"""Ollama's endpoints for embeddings: /api/embed, and the older /api/embeddings with one text."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI, Request, Response

from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.respond import Responses, add_post, in_time
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.vectors import VectorsRequest, make_vectors, places_in
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.ollama import bodies
from inflight.entrypoints.ollama.protocol import EmbeddingsRequest, EmbedRequest
from inflight.entrypoints.ollama.translation import served_name
from inflight.pooling_params import PoolingParams

_OWN_NAMES = {"truncate_prompt_tokens": "truncate"}


def add_embedding_routes(app: FastAPI, server: ApiServer, errors: Responses) -> None:
    def answer(body: StrictModel, request: Request, asked: VectorsRequest, *, is_older: bool, model: str) -> Response:
        async def make() -> tuple[bytes, list[str]]:
            begin = time.monotonic_ns()
            found = await make_vectors(server, request, asked)
            vectors = [each[0].tolist() for each in found.values]
            if is_older:
                return await asyncio.to_thread(to_json, {"embedding": vectors[0]}), []
            took = time.monotonic_ns() - begin
            whole: bodies.EmbedAnswer = {
                "model": model,
                "embeddings": vectors,
                "total_duration": took,
                "load_duration": 0,
                "prompt_eval_count": found.num_tokens,
            }
            return await asyncio.to_thread(to_json, whole), []

        return in_time(server, request, body, make, FieldNames(body, prompt="prompt", own=_OWN_NAMES))

    async def embed(body: EmbedRequest, request: Request) -> Response:
        known = served_name(server, body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        cut = None if body.truncate is False else -1
        params = PoolingParams(task="embed", dimensions=body.dimensions, truncate_prompt_tokens=cut)
        places = ["input"] if isinstance(body.input, str) else places_in("input", len(texts))
        asked = VectorsRequest(prompts=texts, params=params, places=places)
        return answer(body, request, asked, is_older=False, model=body.model or known)

    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        known = served_name(server, body.model)
        params = PoolingParams(task="embed", use_activation=False, truncate_prompt_tokens=-1)
        asked = VectorsRequest(prompts=[body.prompt], params=params, places=["prompt"])
        return answer(body, request, asked, is_older=True, model=body.model or known)

    add_post(app, "/api/embed", embed, {"model": bodies.EmbedAnswer}, errors)
    add_post(app, "/api/embeddings", embeddings, {"model": bodies.OlderEmbedAnswer}, errors)
