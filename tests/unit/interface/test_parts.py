"""Parts of requests and their results, as everybody sees them who carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequestError
from inflight.interface.part_kinds import parts_of
from inflight.interface.parts import RequestPart, after_results, join_results
from inflight.interface.prompt_logprobs import PromptLogprobsPart, PromptLogprobsResult
from inflight.interface.request import LogprobsColumns
from inflight.sampling_params import SamplingParams

PART = PromptLogprobsPart(num_logprobs=1)


@dataclass(frozen=True)
class Other(RequestPart):
    kind: str = "other"


def result(start: int, stop: int) -> PromptLogprobsResult:
    ids = np.arange(2 * start, 2 * stop, dtype=np.int32).reshape(-1, 2)
    columns = LogprobsColumns(token_ids=ids, logprobs=ids.astype(np.float32), ranks=ids[:, 0])
    return PromptLogprobsResult(start=start, columns=columns)


def same(one: Any, other: PromptLogprobsResult) -> bool:
    fields = "token_ids logprobs ranks".split()
    equal = all(np.array_equal(getattr(one.columns, name), getattr(other.columns, name)) for name in fields)
    return one.start == other.start and equal


def test_a_part_goes_on_behind_its_results() -> None:
    assert (PART.first_position, Other().first_position) == (0, None)
    parts = after_results((Other(), PART), [result(1, 4), result(4, 9)])
    assert parts == (Other(), PromptLogprobsPart(num_logprobs=1, num_done=9))
    assert parts[1].first_position == 8
    assert after_results((Other(),), [result(1, 4)]) == (Other(),)


def test_results_are_joined_by_kind_and_divided() -> None:
    (joined,) = join_results([result(1, 4), result(4, 9), result(9, 30)])
    assert same(joined, result(1, 30)) and joined.size == 58
    assert join_results([]) == ()
    pieces = list(joined.pieces(9))
    assert [piece.size for piece in pieces] == [8] * 7 + [2]
    (again,) = join_results(pieces)
    assert same(again, joined)


@pytest.mark.parametrize("parts", [(Other(),), (PART, Other()), (PART, PART), ("prompt_logprobs",), (None,)])
def test_parts_that_no_request_may_have(parts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parts_of(SamplingParams(), parts)


def test_parts_of_parameters() -> None:
    asked = PromptLogprobsPart(num_logprobs=3)
    assert parts_of(SamplingParams(), [PART]) == (PART,)
    assert parts_of(SamplingParams(prompt_logprobs=3), []) == (asked,)
    with pytest.raises(InvalidRequestError):
        parts_of(SamplingParams(prompt_logprobs=3), [PART])
