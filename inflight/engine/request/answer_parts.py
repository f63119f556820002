"""`AnswerPart`: collects what comes of a part of a request (interface/parts.py), until the caller gets it.

`ANSWER_PARTS` has the kinds whose results a caller can get. To add a kind, see docs/extending.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from inflight.config.pooler import ALL
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.token_logprobs import logprobs_dicts
from inflight.interface.parts import PartResult, RequestPart, after_results
from inflight.interface.pooling import PoolingPart, PoolingResult
from inflight.interface.prompt_logprobs import PromptLogprobsResult
from inflight.interface.request import Float32Array
from inflight.outputs import Logprob
from inflight.tokenizer.tokenizer import Tokenizer


class AnswerPart(ABC):
    """Made when the request begins. `tokenizer` is None if the engine has none."""

    kind: str

    @abstractmethod
    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None: ...

    @abstractmethod
    def add(self, result: PartResult) -> None:
        """Add a result. Results come in the order of the steps; several steps may have been joined or divided."""

    @abstractmethod
    def value(self) -> object | None:
        """What `RequestOutput.parts` has under the kind's name; None while something is missing."""


class PromptLogprobsAnswer(AnswerPart):
    """An entry for each prompt token. The first is None, because the first token has no log-probability."""

    kind = "prompt_logprobs"

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        self._rows: list[dict[int, Logprob] | None] = [None]
        self._num_tokens = len(request.prompt_token_ids)
        self._num_logprobs = request.params.prompt_logprobs or 0
        self._tokenizer = tokenizer

    def add(self, result: PartResult) -> None:
        assert isinstance(result, PromptLogprobsResult)
        self._rows += logprobs_dicts(result.columns, self._num_logprobs, self._tokenizer)

    def value(self) -> list[dict[int, Logprob] | None] | None:
        return self._rows if len(self._rows) >= self._num_tokens else None


class PoolingAnswer(AnswerPart):
    """float32 [n, size]: the vectors of all tokens, or one vector."""

    kind = "pooling"

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        (part,) = (part for part in request.sequences[0].parts if isinstance(part, PoolingPart))
        self._num_vectors = len(request.prompt_token_ids) if part.pooling_type == ALL else 1
        self._vectors: list[Float32Array] = []

    def add(self, result: PartResult) -> None:
        assert isinstance(result, PoolingResult)
        self._vectors.append(result.vectors)

    def value(self) -> Float32Array | None:
        if sum(map(len, self._vectors)) < self._num_vectors:
            return None
        self._vectors = [np.concatenate(self._vectors)]
        return self._vectors[0]


ANSWER_PARTS: dict[str, type[AnswerPart]] = {each.kind: each for each in (PromptLogprobsAnswer, PoolingAnswer)}


class AnswerParts:
    """What comes of the parts of a request. Results are those of its first sequence."""

    def __init__(self, parts: Sequence[RequestPart], request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        kinds = [part.kind for part in parts if part.kind in ANSWER_PARTS]
        self._parts = {kind: ANSWER_PARTS[kind](request, tokenizer) for kind in kinds}

    def add(self, index: int, parts: tuple[RequestPart, ...], results: Sequence[PartResult]) -> tuple[RequestPart, ...]:
        """Add results of the sequence number `index`. Returns its `parts` as they are after the results."""
        for result in results:
            if index == 0 and result.kind in self._parts:
                self._parts[result.kind].add(result)
        return after_results(parts, results)

    def take(self, *, keep: bool) -> dict[str, Any]:
        """Returns what is complete, by kind. Without `keep`, later calls do not return it again."""
        found = {kind: value for kind, part in self._parts.items() if (value := part.value()) is not None}
        if not keep:
            self._parts = {kind: part for kind, part in self._parts.items() if kind not in found}
        return found
