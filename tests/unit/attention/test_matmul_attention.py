from __future__ import annotations

import math

import pytest
import torch

from inflight.attention import matmul_attention

pytestmark = pytest.mark.skipif(
    not matmul_attention.is_available(torch.device("cpu"), torch.bfloat16), reason="no bfloat16 product here"
)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    scores = q.double() @ k.double().mT * scale + mask.double()
    return torch.softmax(scores, dim=-1) @ v.double()


def test_large_scores_of_a_group_are_exact_enough(generator: torch.Generator) -> None:
    """Scores rounded once, to 8 bits, miss by 0.1 here: the second product is what this tests."""
    q = (8 * torch.randn(3, 2, 2, 128, generator=generator)).bfloat16()
    k, v = torch.randn(2, 3, 2, 300, 128, generator=generator).bfloat16()
    mask = torch.zeros(3, 1, 1, 300).bfloat16()
    mask[1, ..., 250:] = -math.inf
    scale = 128**-0.5
    out = matmul_attention.attend_group(q, k, v, mask, scale).double()
    exact = truth(q, k, v, mask, scale)
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("score_bytes", [1, 1 << 20])
def test_a_piece(generator: torch.Generator, score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_attention, "SCORE_BYTES", score_bytes)
    q = (8 * torch.randn(5, 3, 40, 64, generator=generator)).bfloat16()
    k, v = torch.randn(2, 5, 100, 64, generator=generator).bfloat16()
    mask = torch.full((40, 40), -math.inf).triu(1)
    whole = torch.cat((torch.zeros(40, 60), mask), dim=1)
    out = torch.empty(40, 5, 3, 64, dtype=torch.bfloat16).permute(1, 2, 0, 3)
    matmul_attention.attend_piece(q, k.float(), v, mask, 0.125, out)
    exact = truth(q, k[:, None], v[:, None], whole, 0.125)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=2**-7)
