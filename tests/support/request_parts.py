"""Request parts for tests that make requests without an input processor."""

from __future__ import annotations

from inflight.interface.part_kinds import parts_of
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import Float32Array, LogprobsColumns
from inflight.sampling_params import SamplingParams


def asked_parts(params: SamplingParams, *, index: int = 0) -> tuple[RequestPart, ...]:
    """What the sampling parameters ask for, for the sequence of this index."""
    return tuple(part for part in parts_of(params, ()) if index == 0 or not part.is_of_leader)


def prompt_results(columns: LogprobsColumns, start: int = 1) -> tuple[PartResult, ...]:
    from inflight.interface.prompt_logprobs import PromptLogprobsResult  # a test runs without this kind of part

    return (PromptLogprobsResult(start=start, columns=columns),)


def pooling_results(vectors: Float32Array) -> tuple[PartResult, ...]:
    from inflight.interface.pooling import PoolingResult  # a test runs without this kind of part

    return (PoolingResult(vectors=vectors),)
