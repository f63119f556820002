"""The endpoints: /v1/embeddings, /pooling, /classify, /score, /rerank and Cohere's /v2/embed."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from fastapi import FastAPI, Request, Response

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.fields.readable_history import make_readable
from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.http.chat_request import ChatPrompt
from inflight.entrypoints.http.field_names import MESSAGES, FieldNames
from inflight.entrypoints.http.rendering import render_text
from inflight.entrypoints.http.respond import add_post, in_time
from inflight.entrypoints.http.server import ApiServer
from inflight.entrypoints.http.vectors import Vectors, VectorsRequest, at_place, make_vectors, places_in
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.pooled_values import NO_INSTRUCTION, PairPrompts, comparison, scores_pairs, with_prompts
from inflight.entrypoints.pooling_api.bodies import (
    Classification,
    CohereEmbeddings,
    Embeddings,
    Pooled,
    PoolingUsage,
    RankedDocument,
    Reranking,
    Scores,
)
from inflight.entrypoints.pooling_api.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankDocument,
    RerankRequest,
    ScoreRequest,
    TextFields,
)
from inflight.errors import InvalidRequestError
from inflight.interface.parts import RequestPart
from inflight.interface.request import Float32Array
from inflight.pooling_params import PoolingParams
from inflight.tokenizer.text_pair import FIRST, SECOND, PairLimits

Body = TypeVar("Body", bound=StrictModel)
_PAIRS_AT_ONCE = 32  # are tokenised in a thread, so that other texts can come between
# Parameters -> Cohere's fields
_COHERE_NAMES = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
# Cohere's names of prompts -> the names that models have
_COHERE_TYPES = {"search_query": "query", "search_document": "document"}


def add_routes(app: FastAPI, server: ApiServer) -> None:
    _Routes(app, server).add()


class _Comparison(NamedTuple):
    """One text of `lefts` for all of `rights`, or one for each.

    Attributes:
        places: where the lefts stand in the request, and then the places of the rights.
        instruction: for the template.
    """

    lefts: Sequence[str]
    rights: Sequence[str]
    places: list[str]
    limits: PairLimits
    instruction: str | None


class _Routes:
    def __init__(self, app: FastAPI, server: ApiServer) -> None:
        self._app, self._server = app, server
        self._pairs: PairPrompts | None = None
        self._pooler = server.engine.input_processor.config.model.pooler

    def add(self) -> None:
        self._add(("/v1/embeddings",), EmbeddingRequest, self._embeddings, Embeddings, "input")
        self._add(("/pooling",), PoolingRequest, self._pooling, Pooled, "input")
        self._add(("/classify",), ClassificationRequest, self._classes, Classification, "input")
        self._add(("/score", "/v1/score"), ScoreRequest, self._scores, Scores, "text_2")
        self._add(
            ("/rerank", "/v1/rerank", "/v2/rerank"),
            RerankRequest,
            self._ranks,
            Reranking,
            "documents",
            own={"instruction": "instruct"},
        )
        self._add(("/v2/embed",), CohereEmbedRequest, self._cohere, CohereEmbeddings, "texts", own=_COHERE_NAMES)

    def _add(
        self,
        paths: Sequence[str],
        kind: type[Body],
        answer: Callable[[Body, Request], Awaitable[Any]],  # Any: JSON of the type `model`
        model: Any,
        prompt: str,
        own: Mapping[str, str] | None = None,
    ) -> None:
        """`prompt`: the field with the texts, if the request has no messages. `own`: as in `FieldNames`."""

        async def endpoint(body: Any, request: Request) -> Response:  # Any: `kind`, set below
            self._server.check_model(body.model)

            async def make() -> tuple[bytes, list[str]]:
                found = await answer(body, request)
                return await asyncio.to_thread(to_json, found), []

            field = MESSAGES if getattr(body, MESSAGES, None) is not None else prompt
            return in_time(self._server, request, body, make, FieldNames(body, prompt=field, own=own))

        endpoint.__annotations__ = {"body": kind, "request": Request, "return": Response}
        endpoint.__name__ = answer.__name__.strip("_")
        for path in paths:
            add_post(self._app, path, endpoint, {"model": model})

    # -- texts -------------------------------------------------------------------------------------------------------

    async def _embeddings(self, body: EmbeddingRequest, request: Request) -> Embeddings:
        found = await self._vectors_of_texts(body, request, "embed", body.dimensions, body.input_type)
        is_base64 = body.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(vectors[0], is_base64)}
                for index, vectors in enumerate(found.values)
            ],
            "model": self._server.check_model(body.model),
            "usage": _usage(found),
        }

    async def _pooling(self, body: PoolingRequest, request: Request) -> Pooled:
        task = body.task or self._pooler.tasks[0]
        found = await self._vectors_of_texts(body, request, task, body.dimensions, body.input_type)
        is_base64, of_tokens = body.encoding_format == "base64", task.startswith("token_")
        return {
            "id": _new_id("pool"),
            "created": self._server.created,
            "model": self._server.check_model(body.model),
            "object": "list",
            "data": [
                {"object": "pooling", "index": index, "data": _written(vectors if of_tokens else vectors[0], is_base64)}
                for index, vectors in enumerate(found.values)
            ],
            "usage": _usage(found),
        }

    async def _classes(self, body: ClassificationRequest, request: Request) -> Classification:
        found = await self._vectors_of_texts(body, request, "classify", None, None)
        labels = self._pooler.labels
        return {
            "id": _new_id("classify"),
            "created": self._server.created,
            "model": self._server.check_model(body.model),
            "object": "list",
            "data": [
                {
                    "index": index,
                    "label": labels[int(vectors[0].argmax())],
                    "probs": vectors[0].tolist(),
                    "num_classes": len(labels),
                }
                for index, vectors in enumerate(found.values)
            ],
            "usage": _usage(found),
        }

    async def _cohere(self, body: CohereEmbedRequest, request: Request) -> CohereEmbeddings:
        name = _COHERE_TYPES.get(body.input_type or "", body.input_type)
        known = dict(self._pooler.prompts)
        if name not in known and body.input_type in (*_COHERE_TYPES, "classification", "clustering"):
            name = None  # Cohere's clients must send a type; a model without prompts needs none
        cut = None if body.truncate == "NONE" else body.max_tokens or -1
        prompts = [self._prompt_before(name, "input_type") + text for text in body.texts]
        found = await make_vectors(
            self._server,
            request,
            VectorsRequest(
                prompts=prompts,
                params=PoolingParams(task="embed", dimensions=body.output_dimension, truncate_prompt_tokens=cut),
                places=places_in("texts", len(prompts)),
                priority=body.priority or 0,
            ),
        )
        kinds = body.embedding_types or ["float"]
        return {
            "id": _new_id("embd"),
            "response_type": "embeddings_by_type",
            "embeddings": {
                kind: [_written(vectors[0], kind == "base64") for vectors in found.values] for kind in kinds
            },
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": found.num_tokens}},
        }

    async def _vectors_of_texts(
        self, body: TextFields, request: Request, task: str, dimensions: int | None, prompt_name: str | None
    ) -> Vectors:
        if (body.input is None) == (body.messages is None):
            raise FieldError("input", "give input or messages" if body.input is None else "give input, or messages")
        if body.messages is not None:
            return await self._vectors_of_chat(body, request, self._params(body, task, dimensions), prompt_name)
        given: Any = body.input  # Any: mypy cannot tell a list of token ids from a list of texts
        is_one = isinstance(given, str) or isinstance(given[0], int)
        before = self._prompt_before(prompt_name, "input_type") if task.endswith("embed") else ""
        prompts = [before + each if isinstance(each, str) else each for each in ([given] if is_one else given)]
        return await make_vectors(
            self._server,
            request,
            VectorsRequest(
                prompts=prompts,
                params=self._params(body, task, dimensions),
                places=["input"] if is_one else places_in("input", len(prompts)),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                add_special_tokens=body.add_special_tokens is not False,
            ),
        )

    async def _vectors_of_chat(
        self, body: TextFields, request: Request, params: PoolingParams, prompt_name: str | None
    ) -> Vectors:
        if prompt_name is not None:
            raise FieldError("input_type", "input_type is for input; messages can have a message of the role system")
        readable, left_out = make_readable(body.messages or (), RequestImages(are_read=False))
        if left_out:
            raise FieldError("messages", f"messages: only texts can be read here, and not {', '.join(left_out)}")
        prompt = ChatPrompt(
            messages=template_messages(readable),
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs or {},
        )
        text = (await render_text(self._server, prompt)).text
        return await make_vectors(
            self._server,
            request,
            VectorsRequest(
                prompts=[text],
                params=params,
                places=["messages"],
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                add_special_tokens=prompt.add_special_tokens,
            ),
        )

    # -- pairs -------------------------------------------------------------------------------------------------------

    async def _scores(self, body: ScoreRequest, request: Request) -> Scores:
        first, lefts, left_places = _one_of(body, "text_1", "queries", "data_1")
        second, rights, right_places = _one_of(body, "text_2", "documents", "data_2", "items")
        if len(lefts) not in (1, len(rights)):
            raise FieldError(
                first, f"{first} has {len(lefts)} texts and {second} has {len(rights)}: give one text, or as many"
            )
        asked = _Comparison(
            lefts, rights, left_places + right_places, PairLimits(body.truncate_prompt_tokens), body.instruction
        )
        scores, found = await self._compare(body, request, asked)
        return {
            "id": _new_id("score"),
            "created": self._server.created,
            "model": self._server.check_model(body.model),
            "object": "list",
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": _usage(found),
        }

    async def _ranks(self, body: RerankRequest, request: Request) -> Reranking:
        texts = [each.text if isinstance(each, RerankDocument) else each for each in body.documents]
        places = ["query"] + [
            f"documents[{index}]" + (".text" if isinstance(each, RerankDocument) else "")
            for index, each in enumerate(body.documents)
        ]
        limits = PairLimits(body.truncate_prompt_tokens, body.max_tokens_per_query, body.max_tokens_per_doc)
        asked = _Comparison([body.query], texts, places, limits, body.instruction or body.instruct or None)
        scores, found = await self._compare(body, request, asked)
        best_first = sorted(
            range(len(texts)), key=lambda index: -scores[index]
        )  # equal scores: in the order of the texts

        def ranked(index: int) -> RankedDocument:
            found: RankedDocument = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                found["document"] = {"text": texts[index]}
            return found

        return {
            "id": _new_id("rerank"),
            "model": self._server.check_model(body.model),
            "usage": _usage(found),
            "results": [ranked(index) for index in best_first[: body.top_n]],
        }

    async def _compare(self, body: PoolingFields, request: Request, asked: _Comparison) -> tuple[list[float], Vectors]:
        if scores_pairs(self._pooler):
            return await self._score_pairs(body, request, asked)
        task, compare = comparison(self._pooler)
        if asked.instruction is not None:
            raise InvalidRequestError(NO_INSTRUCTION, "instruction")
        lefts, rights = with_prompts(self._pooler, asked.lefts, asked.rights)
        total, *each_side = asked.limits
        of_left, of_right = (PoolingParams(task=task, truncate_prompt_tokens=most or total) for most in each_side)
        found = await make_vectors(
            self._server,
            request,
            VectorsRequest(
                prompts=[*lefts, *rights],
                params=[of_left] * len(lefts) + [of_right] * len(rights),
                places=asked.places,
                priority=body.priority or 0,
            ),
        )
        first, second = found.values[: len(asked.lefts)], found.values[len(asked.lefts) :]
        if len(first) == 1:
            first = first * len(second)
        return [compare(one, other) for one, other in zip(first, second, strict=True)], found

    async def _score_pairs(
        self, body: PoolingFields, request: Request, asked: _Comparison
    ) -> tuple[list[float], Vectors]:
        engine = self._server.engine
        if self._pairs is None:
            model = engine.input_processor.config.model
            self._pairs = await asyncio.to_thread(PairPrompts, engine.tokenizer, engine.chat_template, model)
        ones = [asked.lefts[0]] * len(asked.rights) if len(asked.lefts) == 1 else asked.lefts
        pairs = list(zip(ones, asked.rights, strict=True))
        left_places = asked.places[: len(asked.lefts)] * (len(pairs) // len(asked.lefts))
        places = list(zip(left_places, asked.places[len(asked.lefts) :], strict=True))
        encoded: list[tuple[list[int], tuple[RequestPart, ...]]] = []
        with engine.accepted():  # if the queue is full, nothing is tokenised
            for first in range(0, len(pairs), _PAIRS_AT_ONCE):
                some = slice(first, first + _PAIRS_AT_ONCE)
                encoded += await asyncio.to_thread(_encode, self._pairs, pairs[some], places[some], asked)
        found = await make_vectors(
            self._server,
            request,
            VectorsRequest(
                prompts=[ids for ids, _ in encoded],
                params=PoolingParams(task="classify", use_activation=body.use_activation is not False),
                places=asked.places[len(asked.lefts) :],
                priority=body.priority or 0,
                parts=[parts for _, parts in encoded],
            ),
        )
        return [float(vectors[0, 0]) for vectors in found.values], found

    # -- what they share ---------------------------------------------------------------------------------------------

    def _params(self, body: PoolingFields, task: str, dimensions: int | None) -> PoolingParams:
        return PoolingParams(
            task=task,
            dimensions=dimensions,
            use_activation=body.use_activation is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )

    def _prompt_before(self, name: str | None, field: str) -> str:
        try:
            return self._pooler.text_before(name)
        except InvalidRequestError as error:
            raise FieldError(field, field + str(error).removeprefix("prompt_name")) from error


def _encode(
    pairs: PairPrompts, texts: Sequence[tuple[str, str]], places: Sequence[tuple[str, str]], asked: _Comparison
) -> list[tuple[list[int], tuple[RequestPart, ...]]]:
    """`places`: of the two texts of each pair, for errors."""
    made = []
    for pair, (left, right) in zip(texts, places, strict=True):
        try:
            made.append(pairs.make(*pair, asked.limits, asked.instruction))
        except InvalidRequestError as error:
            if error.param not in (FIRST, SECOND):
                raise
            raise at_place(error, left if error.param == FIRST else right) from error
    return made


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _one_of(body: ScoreRequest, *names: str) -> tuple[str, list[str], list[str]]:
    """The field of `names` that the request has, its texts, and the place of each text."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        others = " or ".join(names[1:])
        problem = f"give {names[0]}, or {others}, and not both" if given else f"{names[0]} is missing"
        raise FieldError(given[1] if given else names[0], problem)
    found: str | list[str] = getattr(body, given[0])
    if isinstance(found, str):
        return given[0], [found], [given[0]]
    return given[0], found, places_in(given[0], len(found))


def _written(values: Float32Array, is_base64: bool) -> list[float] | str:
    if is_base64:
        return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
    numbers: list[float] = values.tolist()
    return numbers


def _usage(found: Vectors) -> PoolingUsage:
    return {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
