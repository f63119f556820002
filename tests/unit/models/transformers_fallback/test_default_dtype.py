"""`DefaultDtype` has the effect of torch.set_default_dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from inflight.models.transformers_fallback.default_dtype import DefaultDtype, float32_by_default

INTEGERS = torch.tensor([1, 2, 5])


def inverse_frequencies() -> Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8))


MAKERS: list[Callable[[], Tensor]] = [
    partial(torch.empty, 2),
    partial(torch.zeros, (2, 3), dtype=None),
    partial(torch.full, (2,), -0.1),
    partial(torch.full, (2,), 3),
    partial(torch.arange, 3),
    partial(torch.arange, 0.0, 1.0, 0.3),
    partial(torch.tensor, 0.1),
    partial(torch.tensor, [[1, 2], [3, 4]]),
    partial(torch.tensor, np.array([0.1])),
    partial(torch.as_tensor, np.array([0.1], dtype=np.float32)),
    partial(torch.tensor, 0.1, dtype=torch.float64),
    partial(torch.linspace, 0, 1, 7),
    lambda: nn.Linear(3, 2).weight,
    lambda: nn.Embedding(3, 2).weight,
    lambda: INTEGERS / 3,
    lambda: 1 / INTEGERS,
    lambda: INTEGERS * 0.1,
    lambda: INTEGERS.sqrt(),
    lambda: torch.outer(INTEGERS.float(), INTEGERS.float()),
    lambda: INTEGERS.float(),
    lambda: INTEGERS.to(torch.float16),
    lambda: INTEGERS.double() * 0.1,
    lambda: torch.where(INTEGERS > 1, 1.0, 0.5),
    inverse_frequencies,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_a_default_dtype(dtype: torch.dtype) -> None:
    def made() -> list[Tensor]:
        torch.manual_seed(0)
        return [make() for make in MAKERS]

    torch.set_default_dtype(dtype)
    try:
        wanted = made()
    finally:
        torch.set_default_dtype(torch.float32)
    for host in (torch.float32, torch.float16, torch.float64):
        torch.set_default_dtype(host)
        try:
            with DefaultDtype(dtype):
                found = made()
        finally:
            torch.set_default_dtype(torch.float32)
        assert [each.dtype for each in found] == [each.dtype for each in wanted]
        assert all(a.equal(b) for a, b in zip(found[1:], wanted[1:], strict=True))  # the first is not initialised


def test_float32_costs_nothing_where_it_is_the_default() -> None:
    assert not isinstance(float32_by_default(), DefaultDtype)
    torch.set_default_dtype(torch.float64)
    try:
        with float32_by_default():
            assert torch.zeros(1).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
