"""Embeddings, classes, scores and reranking, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.pooling_api.routes",
    versioned=("/embeddings",),
    instead={**dict.fromkeys(("/embed", "/embedding"), ": use /v1/embeddings or /v2/embed")},
)
