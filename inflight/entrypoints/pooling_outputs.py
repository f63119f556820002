"""What the methods of `LLM` return that make vectors and scores. The names are those of vLLM."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """`probs`: one number for each class. `labels`: their names."""

    probs: list[float]
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """`data`: float32 [size], or [num_tokens, size] with a vector for each token."""

    data: npt.NDArray[np.float32]


Pooled = TypeVar("Pooled", EmbeddingOutput, ClassificationOutput, ScoringOutput, PoolingOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What `embed`, `classify`, `score` and `encode` return for a prompt. `num_cached_tokens`: as in `RequestOutput`."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
