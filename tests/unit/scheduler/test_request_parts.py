"""What parts of requests cost a step, and what comes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_parts import fitting_tokens, record_results
from inflight.scheduler.step_time.limits import Prompt, StepBudget
from inflight.scheduler.step_time.load import StepLoad


@dataclass(frozen=True)
class Dear(RequestPart):
    """Each token costs as much as its position, or `price`."""

    kind: str = "dear"
    price: int | None = None
    num_results: int = 0
    max_step_cost = 10

    def cost(self, start: int, stop: int) -> int:
        return sum(range(start, stop)) if self.price is None else self.price * (stop - start)

    def after(self, result: PartResult) -> Dear:
        return replace(self, num_results=self.num_results + result.size)


@dataclass(frozen=True)
class Free(RequestPart):
    kind: str = "free"


@dataclass(frozen=True)
class Result(PartResult):
    kind: str = "dear"

    @property
    def size(self) -> int:
        return 1

    def joined(self, later: Any) -> Result:
        return self


@given(st.integers(0, 9), st.integers(0, 12), st.integers(0, 10), st.sampled_from([None, 0, 1, 3, 11]))
def test_as_many_tokens_as_the_costs_allow(start: int, count: int, before: int, price: int | None) -> None:
    part, spent = Dear(price=price), {"dear": before, "other": 99}
    allowed = [
        n for n in range(count + 1) if before + part.cost(start, start + n) <= 10 or not part.cost(start, start + n)
    ]
    wanted = max(allowed)
    if not before and count:
        wanted = max(wanted, 1)  # otherwise the prompt would never be computed
    assert fitting_tokens((Free(), part), start, count, spent) == wanted
    assert spent == {"dear": before + part.cost(start, start + wanted), "other": 99}


def test_free_parts_leave_no_trace() -> None:
    spent: dict[str, int] = {}
    assert (fitting_tokens((Free(),), 3, 7, spent), spent) == (7, {})


def test_the_prompts_of_a_step_share_the_budget_of_a_kind() -> None:
    budget, parts = StepBudget(100, 4, None, math.inf, StepLoad(), 0), (Dear(price=2),)
    assert budget.prompt_tokens(Prompt(0, 20, False, 0), 0) == 20
    assert [budget.prompt_tokens(Prompt(0, 20, False, 0, parts), 0) for _ in range(3)] == [5, 0, 0]
    assert budget.prompt_tokens(Prompt(0, 20, False, 0, (Free(),)), 0) == 20


@pytest.mark.parametrize("is_finished", [False, True])
def test_results_are_noted_for_requests_that_have_not_ended(is_finished: bool) -> None:
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)
    requests = [
        Request(
            EngineCoreRequest(request_id=str(i), sampling=sampling, parts=(Free(), Dear())),
            np.arange(3, dtype=np.int32),
            order=i,
            blocks=RequestBlocks(([],), b""),
            max_model_len=64,
        )
        for i in range(3)
    ]
    if is_finished:
        requests[2].status = RequestStatus.FINISHED
    result = Result()
    found = record_results([(0, result), (2, result), (2, result)], requests)
    assert found == ({0: (result,)} if is_finished else {0: (result,), 2: (result, result)})
    assert [request.parts[1] for request in requests] == [Dear(num_results=n) for n in (1, 0, 0 if is_finished else 2)]
    assert requests[0].core.parts == (Free(), Dear()), "a message is not changed"
