"""The JSON objects of the answers, as typed dicts. /openapi.json shows them."""

from typing import Any, NotRequired

from inflight.entrypoints.http.bodies import Body


class PoolingUsage(Body):
    prompt_tokens: int
    total_tokens: int


class Embedding(Body):
    object: str
    index: int
    embedding: list[float] | str


class Embeddings(Body):
    object: str
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class PooledText(Body):
    object: str
    index: int
    data: Any  # a list of numbers, a list for each token, or base64


class Pooled(Body):
    id: str
    object: str
    created: int
    model: str
    data: list[PooledText]
    usage: PoolingUsage


class Classes(Body):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(Body):
    id: str
    object: str
    created: int
    model: str
    data: list[Classes]
    usage: PoolingUsage


class Score(Body):
    index: int
    object: str
    score: float


class Scores(Body):
    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedText(Body):
    text: str


class RankedDocument(Body):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Reranking(Body):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]


class CohereEmbeddings(Body):
    id: str
    response_type: str
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: dict[str, Any]
