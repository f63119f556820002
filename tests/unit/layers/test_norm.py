"""RMSNorm. In plain torch: bit for bit what transformers computes, but for the last bit of the sum of squares."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from inflight.config.ranks import RankLayout
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.thread_world import ThreadWorlds
from inflight.layers.norm import RMSNorm
from inflight.layers.qk_norm import QKNorm, WholeQKNorm
from inflight.layers.rotary import Rotation
from inflight.layers.sharding import head_shard, repeat_order
from tests.unit.layers.contexts import layer_context


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compared with the float64 reference, in tests/unit/kernels."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")


def truth(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = Qwen3RMSNorm(len(weight), eps)
    norm.weight.data = weight
    out: Tensor = norm(x)
    return out.detach()


def assert_nearly_equal_bits(ours: Tensor, theirs: Tensor) -> None:
    """A bf16 value on the edge between two may fall to either side; none is farther off, and few are."""
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2**-7 if ours.dtype == torch.bfloat16 else 1e-6, atol=1e-7)
    if ours.dtype == torch.bfloat16:
        assert (ours != theirs).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_as_transformers(dtype: torch.dtype, scale: float) -> None:
    norm = RMSNorm(96, 1e-5, layer_context(dtype))
    norm.weight.data.copy_(torch.randn(96))
    x = (torch.randn(17, 96) * scale).to(dtype)
    before = x.clone()
    assert_nearly_equal_bits(norm(x), truth(x, norm.weight.data, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_and_norm_changes_the_residual_only(dtype: torch.dtype) -> None:
    norm = RMSNorm(32, 1e-6, layer_context(dtype))
    x, residual = torch.randn(4, 32).to(dtype), torch.randn(4, 32).to(dtype)
    x_before, total = x.clone(), x + residual
    out = norm.add_and_norm(x, residual)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, total)
    assert torch.equal(out, norm(total))


def test_zeros_stay_zeros() -> None:
    norm = RMSNorm(8, 1e-6, layer_context(torch.bfloat16))
    assert torch.equal(norm(torch.zeros(2, 8).bfloat16()), torch.zeros(2, 8).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_have_weights_of_their_own(dtype: torch.dtype) -> None:
    norm = QKNorm(3, 2, 20, 1e-6, layer_context(dtype))
    weights = {"a.q_norm.weight": torch.randn(20).to(dtype), "a.k_norm.weight": torch.randn(20).to(dtype)}
    slots = dict(norm.weight_slots("a.qk_norm"))
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert slot.shape == (20,)
        slot.destination.copy_(weights[name])
    norm.finish_loading()
    fused = torch.randn(5, 7, 20).to(dtype)  # values behind the keys, as the fused projection leaves them
    no_turn = Rotation(torch.ones(5, 20).to(dtype), torch.zeros(5, 20).to(dtype), layer_context(dtype).ops)
    out = no_turn.apply(fused.clone()[:, :5], norm)
    assert_nearly_equal_bits(out[:, :3], truth(fused[:, :3], weights["a.q_norm.weight"], 1e-6))
    assert_nearly_equal_bits(out[:, 3:], truth(fused[:, 3:5], weights["a.k_norm.weight"], 1e-6))


def test_weights_of_heads_follow_the_order_and_the_offset() -> None:
    """The loader reads both from the slots. Without keys (a layer that reads another's cache) there is no second weight."""
    order = torch.tensor([2, 0, 3, 1])
    norm = QKNorm(3, 0, 4, 1e-6, layer_context(torch.float32), order=order, offset=1.0)
    ((name, slot),) = norm.weight_slots("a.qk_norm")
    assert name == "a.q_norm.weight" and slot.offset == 1.0 and slot.rows is order
    slot.destination.copy_(torch.arange(4.0))
    norm.finish_loading()
    assert norm.weight.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(4, 2, 1), (4, 4, 2), (4, 2, 4), (6, 1, 3)])
def test_a_norm_of_all_heads_together_is_the_same_on_any_number_of_ranks(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    """Also if several ranks hold copies of the same key head."""
    head_dim, eps = 8, 0.01
    totals = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim}
    weights = {f"a.{name}_norm.weight": torch.randn(size) for name, size in totals.items()}
    whole = {name: torch.randn(5, size) for name, size in totals.items()}
    worlds = ThreadWorlds(RankLayout(num_ranks, 1), timeout_seconds=60)

    def normed(rank: int) -> None:
        tp = worlds.of(rank).tensor_parallel_group("model") if num_ranks > 1 else TensorParallelGroup()
        order = torch.arange(head_dim).flip(0)
        parts = {name: head_shard(total // head_dim, head_dim, tp) for name, total in totals.items()}
        parts = {name: replace(part, order=repeat_order(order, part.size)) for name, part in parts.items()}
        norm = WholeQKNorm(parts["q"], parts["k"], eps, layer_context(torch.float32, tp))
        for name, slot in norm.weight_slots("a.qk_norm"):
            assert slot.rows is not None and slot.shape == weights[name].shape
            slot.destination.copy_(weights[name][slot.start : slot.start + slot.size][slot.rows])
        held = {name: slice(part.start, part.start + part.size) for name, part in parts.items()}
        rows = torch.cat([whole[name][:, held[name]] for name in parts] + [torch.ones(5, 3)], dim=1)
        norm(rows)
        found = torch.split(rows, [parts["q"].size, parts["k"].size, 3], dim=1)
        for name, piece in zip(parts, found, strict=False):
            flipped = weights[f"a.{name}_norm.weight"].view(-1, head_dim).flip(1).flatten()
            torch.testing.assert_close(piece, truth(whole[name], flipped, eps)[:, held[name]], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[2], torch.ones(5, 3)), "the values have no norm"

    with ThreadPoolExecutor(num_ranks) as ranks:
        list(ranks.map(normed, range(num_ranks)))
