"""Token masks: plain torch and the C++ kernel of every instruction set here, against numpy, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from inflight.kernels import token_masks
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.token_masks import apply_token_masks, cpu_apply_token_masks, torch_apply_token_masks
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

fixed = hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
ApplyTokenMasks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
EDGES = [1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 151, 320]


@pytest.fixture(params=["torch", *INSTRUCTION_SETS_HERE])
def apply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ApplyTokenMasks:
    monkeypatch.setattr(token_masks, "CHUNK_ELEMENTS", 200)  # so that small masks come in chunks too
    if request.param == "torch":
        return torch_apply_token_masks
    return partial(cpu_apply_token_masks, open_kernels(request.param))


def expected_of(logits: np.ndarray, rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """One bit at a time."""
    out = logits.copy()
    for row, mask in zip(rows.tolist(), masks.view(np.uint32).tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not mask[token // 32] >> token % 32 & 1:
                out[row, token] = -np.inf
    return out


@fixed
@hypothesis.given(data=st.data(), vocab_size=st.sampled_from(EDGES) | st.integers(1, 400), num_rows=st.integers(0, 6))
def test_only_what_is_forbidden_changes(
    apply: ApplyTokenMasks, data: st.DataObject, vocab_size: int, num_rows: int
) -> None:
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(range(num_rows))))) if num_rows else [], dtype=np.int64)
    words = st.sampled_from([0, -1, 1, -(2**31), 0xFFFF, ~0xFFFF, 0xFF00, 0x55555555]) | st.integers(
        -(2**31), 2**31 - 1
    )
    num_words = -(-vocab_size // 32)
    flat = data.draw(st.lists(words, min_size=len(rows) * num_words, max_size=len(rows) * num_words))
    masks = np.array(flat, dtype=np.int32).reshape(len(rows), num_words)
    guarded = np.random.default_rng(vocab_size).normal(size=num_rows * vocab_size + 64).astype(np.float32)
    guarded[::13] = np.nan  # a broken logit stays, where it is allowed
    before = guarded.copy()
    logits = guarded[32 : 32 + num_rows * vocab_size].reshape(num_rows, vocab_size)
    expected = expected_of(logits, rows, masks)
    apply(*map(torch.from_numpy, (logits, rows, masks)))
    np.testing.assert_array_equal(logits, expected)
    for guard in (slice(0, 32), slice(len(guarded) - 32, None)):
        np.testing.assert_array_equal(guarded[guard], before[guard])


def test_many_rows_are_shared_among_threads(apply: ApplyTokenMasks) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(60, 4001)).astype(np.float32)
    rows = np.flatnonzero(generator.random(60) < 0.7)
    masks = generator.integers(-(2**31), 2**31, size=(len(rows), 126), dtype=np.int64).astype(np.int32)
    masks[generator.random(masks.shape) < 0.5] = 0
    expected = expected_of(logits, rows, masks)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        apply(*map(torch.from_numpy, (logits, rows, masks)))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
    ("rows", "num_masks", "num_words"), [([0, 2], 2, 2), ([-1], 1, 2), ([0], 1, 1), ([0], 1, 3), ([0, 1], 1, 2)]
)
def test_what_does_not_fit_is_refused(apply: ApplyTokenMasks, rows: list[int], num_masks: int, num_words: int) -> None:
    logits, masks = torch.zeros(2, 40), torch.zeros(num_masks, num_words, dtype=torch.int32)
    with pytest.raises(AssertionError):
        apply(logits, torch.tensor(rows, dtype=torch.int64), masks)
    assert torch.equal(logits, torch.zeros(2, 40))


def test_the_kernel_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(token_masks, "torch_apply_token_masks", lambda *_: used.append("torch"))
    monkeypatch.setattr(token_masks, "cpu_apply_token_masks", lambda *_: used.append("kernel"))
    for device in ("meta", "cpu"):
        apply_token_masks(*(torch.empty(0, 0, device=device) for _ in range(3)))
    assert used == ["torch", "kernel" if INSTRUCTION_SETS_HERE else "torch"]
