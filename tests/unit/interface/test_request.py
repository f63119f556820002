"""Sequences of one request, and parts of log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inflight.interface.request import EngineCoreRequest, LogprobsColumns, ResolvedSampling
from inflight.sampling_params import SamplingParams

SAMPLING = ResolvedSampling(params=SamplingParams(), seed=1, max_tokens=4)
COLUMNS = LogprobsColumns(
    token_ids=np.arange(15, dtype=np.int32).reshape(5, 3),
    logprobs=-np.arange(15, dtype=np.float32).reshape(5, 3),
    ranks=np.arange(1, 6, dtype=np.int32),
)


def test_siblings() -> None:
    first = EngineCoreRequest(request_id="a", sampling=SAMPLING)
    second, third = (replace(first, request_id=name, prompt_leader="a") for name in "bc")
    other = replace(first, request_id="d")
    for each in (first, second, third):
        for sibling in (first, second, third):
            assert each.is_sibling(sibling)
        assert not each.is_sibling(other) and not other.is_sibling(each)
    assert other.is_sibling(other)
    assert not replace(first, request_id="e", prompt_leader="f").is_sibling(first)


def parts(columns: LogprobsColumns) -> tuple[list[list[int]], list[list[float]], list[int]]:
    return columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist()


def test_rows_and_columns_of_logprobs() -> None:
    assert parts(COLUMNS.rows(1, 3)) == ([[3, 4, 5], [6, 7, 8]], [[-3, -4, -5], [-6, -7, -8]], [2, 3])
    top = COLUMNS.rows(0, 2).top(1)
    assert parts(top) == ([[0, 1], [3, 4]], [[0, -1], [-3, -4]], [1, 2])
    assert parts(COLUMNS.top(0))[0] == [[0], [3], [6], [9], [12]]
    joined = LogprobsColumns.joined([COLUMNS.rows(0, 1), COLUMNS.rows(1, 4), COLUMNS.rows(4, 5)])
    assert parts(joined) == parts(COLUMNS)
