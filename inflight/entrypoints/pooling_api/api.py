"""Embeddings, classes, scores and reranking, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.pooling_api.routes",
    endpoints=dict.fromkeys(
        "/v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank".split(), "POST"
    ),
    versioned=("/embeddings",),
    instead={**dict.fromkeys(("/embed", "/embedding"), ": use /v1/embeddings or /v2/embed")},
)
