"""The truth itself, against torch's and transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from inflight.config.architecture import GELU_TANH, SILU, SWIGLU_OAI
from inflight.kernels.swiglu_oai import swiglu_oai
from tests.support import kernel_reference as reference


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("window", [None, 1, 5, 12])
def test_paged_attention(generator: torch.Generator, window: int | None) -> None:
    """A prompt, a chunk and a decode row over a shuffled arena; the mask is the one transformers makes for Mistral."""
    q = torch.randn(11 + 4 + 1, 4, 8, generator=generator, dtype=torch.float64)
    caches = torch.randn(2, 12, 4, 2, 8, generator=generator, dtype=torch.float64)
    block_table = torch.randperm(12, generator=generator).view(3, 4)
    seq_lens, query_start_loc = torch.tensor([11, 13, 16]), torch.tensor([0, 11, 15, 16])
    out = reference.paged_attention(
        q, *caches, block_table, query_start_loc, seq_lens, scale=0.3, sliding_window=window
    )
    visible = sliding_window_causal_mask_function(100 if window is None else window)
    for row, seq_len in enumerate(seq_lens.tolist()):
        tokens = slice(*query_start_loc[row : row + 2].tolist())
        keys, values = caches[:, block_table[row]].flatten(1, 2)[:, :seq_len].repeat_interleave(2, dim=2)
        num_queries = len(q[tokens])
        positions = torch.arange(seq_len)
        mask = visible(0, 0, positions[-num_queries:, None], positions)
        expected = F.scaled_dot_product_attention(
            q[tokens].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(out[tokens], expected.transpose(0, 1))


@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.5, False), (None, True)])
def test_soft_cap_and_sinks(generator: torch.Generator, soft_cap: float | None, has_sinks: bool) -> None:
    """The cap is Gemma 2's, the sinks are those of gpt-oss."""
    q, k, v = torch.randn(3, 9, 4, 8, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if has_sinks else None
    starts, seq_lens = torch.tensor([0, 9]), torch.tensor([9])
    caches = k[None, :, :2], v[None, :, :2]  # one block
    out = reference.paged_attention(
        q, *caches, torch.tensor([[0]]), starts, seq_lens, scale=0.3, sliding_window=4, soft_cap=soft_cap, sinks=sinks
    )
    visible = sliding_window_causal_mask_function(4)(0, 0, torch.arange(9)[:, None], torch.arange(9))
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~visible, -torch.inf)[None, None]
    module: Any = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    theirs: Any = gpt_oss_attention if has_sinks else gemma2_attention
    more = {} if soft_cap is None else {"softcap": soft_cap}
    heads = (x[None].transpose(1, 2) for x in (q, k[:, :2], v[:, :2]))
    expected, _ = theirs(module, *heads, mask, scaling=0.3, dropout=0.0, **more)
    torch.testing.assert_close(out, expected[0], atol=1e-6, rtol=1e-6)  # Gemma 2's softmax is in float32


def test_rms_norm(generator: torch.Generator) -> None:
    x, residual, weight = torch.randn(3, 5, 16, generator=generator, dtype=torch.float64)
    out, total = reference.rms_norm(x, weight[0], 1e-5, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, F.rms_norm(x + residual, (16,), weight[0], 1e-5))
    torch.testing.assert_close(reference.rms_norm(x, weight[0], 1e-5)[0], F.rms_norm(x, (16,), weight[0], 1e-5))


def test_rotary(generator: torch.Generator) -> None:
    x = torch.randn(5, 3, 12, generator=generator, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 4000])
    inverse = 500.0 ** (-torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    angles = (positions[:, None] * inverse).repeat(1, 2)[None]
    by_head = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(by_head, by_head, angles.cos(), angles.sin())
    torch.testing.assert_close(reference.rotary(x, positions, 500.0), expected[0].transpose(0, 1))


def test_multiply_gate(generator: torch.Generator) -> None:
    x = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(reference.multiply_gate(x, SILU), F.silu(x[:, :5]) * x[:, 5:])
    gelu = F.gelu(x[:, :5], approximate="tanh")
    torch.testing.assert_close(reference.multiply_gate(x, GELU_TANH), gelu * x[:, 5:])
    experts = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=5, num_local_experts=1))
    x = x * 6  # beyond the limits
    alternating = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(1)
    expected = experts._apply_gate(alternating)
    torch.testing.assert_close(reference.multiply_gate(x, SWIGLU_OAI), expected)
    torch.testing.assert_close(swiglu_oai(*x.chunk(2, dim=-1)), expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_quantised_row_with_a_number_that_is_not_finite_is_nan(number: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = number
    assert reference.quantised(x).isnan().all(dim=1).tolist() == [False, True, False]
    assert reference.quantised(x)[::2].isfinite().all()
