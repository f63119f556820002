"""`PoolingPart`: the request wants a vector, made of the hidden states of its prompt. `PoolingResult`: what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from inflight.config.engine import ModelConfig
from inflight.config.pooler import ALL, EMBED, IDENTITY, LAST, PoolerSpec
from inflight.errors import InvalidRequestError
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import Float32Array
from inflight.pooling_params import PoolingParams


@dataclass(frozen=True, kw_only=True)
class PoolingPart(RequestPart):
    """
    Attributes:
        pooling_type: see inflight/config/pooler.py.
        dimensions: how many numbers of a vector are kept; None for all.
        activation: what a vector goes through at last: "identity", "normalize", "softmax" or "sigmoid".
        num_done: with ALL, of how many tokens the receiver has the vectors; otherwise 1 if it has the vector.
    """

    is_of_leader = True

    kind: Literal["pooling"] = "pooling"
    pooling_type: str
    dimensions: int | None = None
    activation: str = IDENTITY
    num_done: int = 0

    @classmethod
    def of(cls, params: PoolingParams, model: ModelConfig) -> PoolingPart:
        """
        Raises:
            InvalidRequestError: the model does not do this task, or has no vectors of this size.
        """
        pooler = model.pooler
        task = params.task or pooler.tasks[0]
        if task not in pooler.tasks:
            raise InvalidRequestError(
                f"task={task!r} is not what this model does; it does {', '.join(pooler.tasks)}", "task"
            )
        if params.dimensions is not None:
            _check_dimensions(params.dimensions, pooler, pooler.size(model.architecture.hidden_size))
        return cls(
            pooling_type=ALL if task.startswith("token_") else pooler.pooling_type,
            dimensions=params.dimensions,
            activation=pooler.activation if params.use_activation else IDENTITY,
        )

    @property
    def first_position(self) -> int | None:
        """The last token of a prompt is always computed, so LAST may find all others in the prefix cache."""
        if self.pooling_type == ALL:
            return self.num_done
        return None if self.num_done or self.pooling_type == LAST else 0

    def after(self, result: PartResult) -> PoolingPart:
        assert isinstance(result, PoolingResult)
        return replace(self, num_done=result.start + len(result.vectors) if self.pooling_type == ALL else 1)


def _check_dimensions(dimensions: int, pooler: PoolerSpec, size: int) -> None:
    """`size`: how many numbers the model's vectors have."""
    if pooler.task != EMBED:
        raise InvalidRequestError(
            f"dimensions={dimensions}: scores of classes cannot be cut; leave dimensions out", "dimensions"
        )
    if dimensions > size:
        raise InvalidRequestError(
            f"dimensions={dimensions} is more than the {size} numbers of this model's vectors", "dimensions"
        )
    if dimensions != size and not pooler.is_matryoshka:
        raise InvalidRequestError(
            f"dimensions={dimensions}: config.json does not say that this model's vectors may be cut (is_matryoshka, "
            "matryoshka_dimensions); leave dimensions out, or start with hf_overrides={'is_matryoshka': True}",
            "dimensions",
        )
    if pooler.dimensions and dimensions not in (*pooler.dimensions, size):
        allowed = ", ".join(map(str, sorted({*pooler.dimensions, size})))
        raise InvalidRequestError(f"dimensions={dimensions} is not one of this model's sizes: {allowed}", "dimensions")


@dataclass(frozen=True, kw_only=True)
class PoolingResult(PartResult):
    """`vectors`: float32 [n, size], of the tokens [start, start + n) with ALL, else one vector."""

    kind: Literal["pooling"] = "pooling"
    start: int = 0
    vectors: Float32Array

    @property
    def size(self) -> int:
        return self.vectors.size

    def joined(self, later: Sequence[PoolingResult]) -> PoolingResult:
        return replace(self, vectors=np.concatenate([self.vectors, *(result.vectors for result in later)]))

    def pieces(self, max_size: int) -> Iterator[PoolingResult]:
        num_rows = max(max_size // max(self.vectors.shape[1], 1), 1)
        for first in range(0, len(self.vectors), num_rows):
            yield replace(self, start=self.start + first, vectors=self.vectors[first : first + num_rows])
