"""The GPU's kernel of token masks, in Triton's interpreter, against one bit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.kernels.triton.token_masks import triton_apply_token_masks
from tests.unit.sample.device_batch import DEVICE


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 700, 2048 + 65])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_only_what_is_forbidden_changes(vocab_size: int, index_dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab_size)
    before = generator.normal(size=4 * vocab_size + 64).astype(np.float32)
    before[::13] = np.nan
    rows = [3, 0, 3]  # the last one is under two masks
    masks = generator.integers(-(2**31), 2**31, size=(3, -(-vocab_size // 32))).astype(np.int32)
    masks[1, 0] = -1
    allowed = (
        masks.view(np.uint32)[:, np.arange(vocab_size) // 32] >> (np.arange(vocab_size) % 32).astype(np.uint32)
    ) & 1
    expected = before.copy()
    for row, allows in zip(rows, allowed, strict=True):
        expected[32:-32].reshape(4, vocab_size)[row, allows == 0] = -np.inf
    guarded = torch.from_numpy(before).to(DEVICE)
    triton_apply_token_masks(
        guarded[32:-32].view(4, vocab_size),
        torch.tensor(rows, dtype=index_dtype, device=DEVICE),
        torch.from_numpy(masks).to(DEVICE),
    )
    np.testing.assert_array_equal(guarded.cpu().numpy(), expected)


def test_no_rows() -> None:
    logits = torch.zeros(2, 40)
    triton_apply_token_masks(logits, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(logits, torch.zeros(2, 40))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match="masks"):
        triton_apply_token_masks(
            torch.zeros(2, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
        )
