"""Which draws are emitted, against a loop over requests and drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.sample.sampler import IMPOSSIBLE_TOKEN
from inflight.sample.verification import emitted_rows, num_emitted

TOKENS = st.sampled_from([IMPOSSIBLE_TOKEN, 0, 1, 2])  # few, so that many are equal


@given(data=st.data(), k=st.integers(0, 5), num_requests=st.integers(0, 6))
def test_against_a_loop(data: st.DataObject, k: int, num_requests: int) -> None:
    num_drafts = [data.draw(st.integers(0, k)) for _ in range(num_requests)]
    draws = [[data.draw(TOKENS) for _ in range(d + 1)] for d in num_drafts]
    drafts = [[data.draw(TOKENS) for _ in range(k)] for _ in range(num_requests)]  # those that do not count among them
    query_start_loc = np.cumsum([0, *(d + 1 for d in num_drafts)]).astype(np.int32)
    expected, rows = [], []
    for drawn, drafted, start in zip(draws, drafts, query_start_loc.tolist(), strict=False):
        count = 1
        while count < len(drawn) and drawn[count - 1] == drafted[count - 1] != IMPOSSIBLE_TOKEN:
            count += 1
        expected.append(count)
        rows += range(start, start + count)
    sampled = torch.tensor([token for drawn in draws for token in drawn], dtype=torch.int32)
    draft_token_ids = torch.tensor(drafts, dtype=torch.int32).reshape(num_requests, k)
    found = num_emitted(sampled, draft_token_ids, query_start_loc)
    assert found.dtype == torch.int64
    assert found.tolist() == expected
    assert emitted_rows(found.numpy(), query_start_loc).tolist() == rows


def test_by_hand() -> None:
    """Three requests: all drafts right, the second draft wrong and the third right again, none."""
    sampled = torch.tensor([5, 6, 7, 1, 2, 3, 4, 9], dtype=torch.int32)
    drafts = torch.tensor([[5, 6, 7], [1, 8, 3], [9, 9, 9]], dtype=torch.int32)
    query_start_loc = np.array([0, 3, 7, 8], dtype=np.int32)
    found = num_emitted(sampled, drafts, query_start_loc)
    assert found.tolist() == [3, 2, 1]
    assert emitted_rows(found.numpy(), query_start_loc).tolist() == [0, 1, 2, 3, 4, 7]


@pytest.mark.parametrize("query_start_loc", [[0, 2], [0, 1, 2, 4], [0, 0, 4], [0, 4, 4], [0, 3, 5]])
def test_what_does_not_fit_is_refused(query_start_loc: list[int]) -> None:
    with pytest.raises(AssertionError):
        num_emitted(
            torch.zeros(4, dtype=torch.int32),
            torch.zeros(2, 2, dtype=torch.int32),
            np.array(query_start_loc, dtype=np.int32),
        )
