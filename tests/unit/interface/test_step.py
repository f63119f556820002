"""The text of a plan in an error dump."""

from __future__ import annotations

import pytest

from tests.support.plans import ints, new_request, step_plan


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_plan_as_text(has_drafts: bool) -> None:
    plan = step_plan(
        [2, 7, 3],
        [10, 0, 4],
        [1, 3, 5],
        [True, False, True],
        step_id=5,
        request_ids=("a", "b", "c"),
        new_requests=(new_request(7, [1, 2, 3], [1]),),
        max_draft_tokens=ints(-1, -1, 4) if has_drafts else ints(),
        grammar_rows=ints(0, 2),
    )
    assert plan.describe().splitlines() == [
        "step 5: 3 requests, 9 tokens",
        "  a: slot 2, tokens [10, 11), samples, under a grammar",
        "  b: slot 7, tokens [0, 3), new in its slot",
        "  c: slot 3, tokens [4, 9), samples, under a grammar" + ", at most 4 of them drafts" * has_drafts,
    ]
