"""Linear layers: the packed method against the plain one, fusion, and sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.config.architecture import GELU_TANH, SILU
from inflight.config.engine import QuantizationConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.layer_ops import TorchLayerOps
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.layers.context import make_context, select_layer_ops, select_linear_method
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.linear_method import KernelLinear, PlainLinear
from inflight.layers.sharding import OutputShard, even_shard, head_shard
from inflight.layers.weights import WeightSlot
from tests.support.kernel_reference import multiply_gate
from tests.unit.layers.contexts import layer_context

CPU = torch.device("cpu")
ALONE = TensorParallelGroup()


class OneOfMany(TensorParallelGroup):
    """A rank whose partial results are left for the test to add up."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def fill(slots: dict[str, WeightSlot], tensors: dict[str, torch.Tensor]) -> None:
    assert slots.keys() == tensors.keys()
    for name, slot in slots.items():
        assert tuple(tensors[name].shape) == slot.shape
        slot.destination.copy_(tensors[name].narrow(slot.dim, slot.start, slot.size))


def test_the_method_follows_device_dtype_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(select_linear_method(torch.device("meta"), torch.bfloat16), PlainLinear)
    if load_kernels() is not None:
        for dtype in (torch.float32, torch.bfloat16):
            assert isinstance(select_linear_method(CPU, dtype), KernelLinear)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(select_linear_method(CPU, dtype), PlainLinear)
    with pytest.raises(ConfigError, match="needs the C\\+\\+ kernels"):
        select_linear_method(CPU, torch.bfloat16, quantization="int8")


@pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
def test_layers_and_head_are_quantized_separately() -> None:
    def bits(layers: str | None, head: str | None) -> tuple[int | None, int | None]:
        context = make_context(
            dtype=torch.bfloat16,
            device=CPU,
            tp=ALONE,
            backend=TorchSdpaBackend(),
            quantization=QuantizationConfig(layers=layers, head=head, group_size=32),
        )
        assert isinstance(context.linear, KernelLinear) and isinstance(context.head, KernelLinear)
        assert (context.linear._group_size, context.weight_device) == (32, CPU)
        return context.linear._bits, context.head._bits

    assert bits(None, None) == (None, None)
    assert bits("int4", "int8") == (4, 8)
    assert bits("int8", None) == (8, None)


def test_dtypes_without_kernels_are_computed_by_torch() -> None:
    assert isinstance(select_linear_method(CPU, torch.float16), PlainLinear)
    assert isinstance(select_layer_ops(CPU, torch.float16), TorchLayerOps)
    assert isinstance(select_layer_ops(CPU, torch.bfloat16), CpuLayerOps) is (load_kernels() is not None)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (20, 60), (33, 7), (1, 1), (203, 48)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_plain_weight_multiplies(num_tokens: int, out_features: int, in_features: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((num_tokens, in_features), (out_features, in_features), (out_features,))
    )
    out = PlainLinear(torch.bfloat16).prepare([weight], bias if has_bias else None)(x, torch.bfloat16)
    truth = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert out.shape == truth.shape
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-2)  # one rounding of a float32 sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_projections_stand_side_by_side(dtype: torch.dtype) -> None:
    parts = {"q_proj": OutputShard(12, 0, 12), "k_proj": OutputShard(4, 0, 4)}
    layer = ColumnParallelLinear(8, parts, bias=True, context=layer_context(dtype))
    tensors = {
        f"attn.{name}.{kind}": torch.randn(shape).to(dtype)
        for name, size in (("q_proj", 12), ("k_proj", 4))
        for kind, shape in (("weight", (size, 8)), ("bias", (size,)))
    }
    fill(dict(layer.weight_slots("attn.qkv_proj")), tensors)
    layer.finish_loading()
    x = torch.randn(5, 8).to(dtype)
    query, key = layer(x).split((12, 4), dim=-1)
    for name, out in (("q_proj", query), ("k_proj", key)):
        truth = F.linear(x, tensors[f"attn.{name}.weight"], tensors[f"attn.{name}.bias"])
        torch.testing.assert_close(out, truth, rtol=2**-7, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_of_a_column_and_a_row_add_up_to_the_whole(size: int) -> None:
    up, down, bias = torch.randn(16, 8), torch.randn(8, 16), torch.randn(8)
    x = torch.randn(3, 8)
    total = torch.zeros(3, 8)
    for rank in range(size):
        tp = OneOfMany(size, rank)
        column = ColumnParallelLinear(
            8, {"up_proj": even_shard(16, tp)}, bias=False, context=layer_context(torch.float32, tp)
        )
        row = RowParallelLinear(16, 8, bias=True, context=layer_context(torch.float32, tp))
        fill(dict(column.weight_slots("mlp.gate_up_proj")), {"mlp.up_proj.weight": up})
        fill(dict(row.weight_slots("mlp.down_proj")), {"mlp.down_proj.weight": down, "mlp.down_proj.bias": bias})
        column.finish_loading()
        row.finish_loading()
        total += row(column(x))
    torch.testing.assert_close(total, F.linear(F.linear(x, up), down, bias))


def test_heads_are_shared_where_there_are_fewer_than_ranks() -> None:
    def starts(num_heads: int, size: int) -> list[tuple[int, int]]:
        parts = [head_shard(num_heads, 10, TensorParallelGroup(size, rank)) for rank in range(size)]
        assert all(part.total == num_heads * 10 for part in parts)
        return [(part.start, part.size) for part in parts]

    assert starts(4, 1) == [(0, 40)]
    assert starts(4, 2) == [(0, 20), (20, 20)]
    assert starts(2, 4) == [(0, 10), (0, 10), (10, 10), (10, 10)]
    assert starts(1, 2) == [(0, 10), (0, 10)]


def test_what_cannot_be_divided_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="5 rows"):
        even_shard(5, TensorParallelGroup(2, 0))
    with pytest.raises(AssertionError, match="3 heads"):
        head_shard(3, 8, TensorParallelGroup(2, 0))


def test_a_group_of_several_ranks_has_to_bring_collectives() -> None:
    x = torch.ones(1)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x) is x
    with pytest.raises(AssertionError):
        TensorParallelGroup(2, 0).all_reduce(x)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("in_features", [8, 6])  # the kernels take multiples of four
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_a_gate_is_applied(activation: str, kernels: str, in_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    parts = {"gate_proj": OutputShard(5, 0, 5), "up_proj": OutputShard(5, 0, 5)}
    layer = ColumnParallelLinear(in_features, parts, bias=False, context=layer_context(torch.float32), gate=activation)
    gate, up, x = torch.randn(5, in_features), torch.randn(5, in_features), torch.randn(3, in_features)
    fill(dict(layer.weight_slots("mlp.gate_up_proj")), {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up})
    layer.finish_loading()
    exact = multiply_gate(torch.cat((x @ gate.T, x @ up.T), dim=-1), activation)
    torch.testing.assert_close(layer(x), exact)


def quantized(rows: int, columns: int, *, group_size: int, seed: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(rows, columns // group_size, generator=generator) + 0.5
    values = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(values=values, scales=scales, offsets=scales * 7, bits=4)


@pytest.mark.parametrize("second_group", [32, 64])
def test_parts_that_are_stored_quantized(second_group: int) -> None:
    """In one format they stay as they are; in several, and beside floats, they are floats."""
    parts = {"q_proj": OutputShard(6, 0, 6), "k_proj": OutputShard(4, 0, 4)}
    query, key = quantized(6, 64, group_size=32, seed=0), quantized(4, 64, group_size=second_group, seed=1)
    layer = ColumnParallelLinear(64, parts, bias=False, context=layer_context(torch.float32))
    slots = dict(layer.weight_slots("attn.qkv_proj"))
    for name, weight in (("k_proj", key), ("q_proj", query)):  # in any order
        accept = slots[f"attn.{name}.weight"].accept
        assert accept is not None
        assert accept(weight)
    layer.finish_loading()
    x = torch.randn(3, 64)
    x[:, 0] = 127.0
    x = x.round()  # a step of the activations is one: nothing is rounded
    truth = F.linear(x.double(), torch.cat([query.dequantize(), key.dequantize()]).double())
    torch.testing.assert_close(layer(x).double(), truth, rtol=1e-3, atol=1e-1)


def test_a_quantized_part_beside_floats() -> None:
    parts = {"q_proj": OutputShard(6, 0, 6), "k_proj": OutputShard(4, 0, 4)}
    query, key = quantized(6, 64, group_size=32, seed=0), torch.randn(4, 64)
    layer = ColumnParallelLinear(64, parts, bias=False, context=layer_context(torch.float32))
    slots = dict(layer.weight_slots("attn.qkv_proj"))
    accept = slots["attn.q_proj.weight"].accept
    assert accept is not None
    assert accept(query)
    slots["attn.k_proj.weight"].destination.copy_(key)
    layer.finish_loading()
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), F.linear(x, torch.cat([query.dequantize(), key])), rtol=1e-4, atol=1e-3)
