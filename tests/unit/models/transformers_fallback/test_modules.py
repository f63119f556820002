"""Modules of transformers that Inflight's layers replace in the fallback."""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from inflight.layers.gated_mlp import GatedMLP
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.sharding import OutputShard
from inflight.models.transformers_fallback import build
from inflight.models.transformers_fallback.adapters import Adapter, FusedAdapter, NormAdapter
from inflight.models.transformers_fallback.build import replace_linears
from inflight.models.transformers_fallback.faster import needs_whole_width, replace_mlps, replace_norms
from tests.unit.layers.contexts import layer_context

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


class OffByOneNorm(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states) + 1.0
        return result


class ReluMLP(LlamaMLP):  # type: ignore[misc]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.act_fn = nn.ReLU()


class DoubledMLP(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = 2 * super().forward(x)
        return result


class ClampedMLP(LlamaMLP):  # type: ignore[misc]
    """As in models with a `swiglu_limit`."""

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.act_fn(self.gate_proj(x).clamp(max=30.0))
        result: Tensor = self.down_proj(gate * self.up_proj(x))
        return result


def test_norms_that_compute_the_usual_thing_are_replaced() -> None:
    torch.manual_seed(0)
    norms = {
        "usual": LlamaRMSNorm(32, eps=1e-5),
        "one_plus": GemmaRMSNorm(32),
        "gated": MambaRMSNormGated(32, group_size=32),
        "other": OffByOneNorm(32),
        "layer_norm": nn.LayerNorm(32),
    }
    model = nn.ModuleDict(norms)
    norms["usual"].weight.data = torch.randn(32)
    x = torch.randn(1, 5, 32)
    wanted = norms["usual"](x)
    replace_norms(model, layer_context(torch.float32))
    assert [name for name, each in model.items() if isinstance(each, NormAdapter)] == ["usual"]
    torch.testing.assert_close(model["usual"](x), wanted)
    torch.testing.assert_close(model["usual"](x.mT.contiguous().mT), wanted)  # rows that are not contiguous


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_mlps_that_compute_the_usual_thing_are_replaced(activation: str) -> None:
    config = LlamaConfig(**SIZES, hidden_act=activation)
    mlps = {
        "usual": LlamaMLP(config),
        "relu": ReluMLP(config),
        "doubled": DoubledMLP(config),
        "clamped": ClampedMLP(config),
        "fused": Phi3MLP(Phi3Config(**SIZES, pad_token_id=0)),
        "exact_gelu": LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu")),
    }
    model = nn.ModuleDict({"layers": nn.ModuleDict(mlps), "outside": LlamaMLP(config)})
    x = torch.randn(1, 5, 32)
    wanted = mlps["usual"](x)
    weights = dict(mlps["usual"].named_parameters())
    replace_mlps(model, "layers", layer_context(torch.float32))
    layers = model["layers"]
    assert isinstance(layers, nn.ModuleDict) and isinstance(model["outside"], LlamaMLP)
    assert [name for name, each in layers.items() if isinstance(each, Adapter)] == ["usual"]
    mlp = layers["usual"].inner
    assert isinstance(mlp, GatedMLP)
    for name, slot in mlp.weight_slots("layers.usual"):
        slot.destination.copy_(weights[name.removeprefix("layers.usual.")].data)
    mlp.finish_loading()
    torch.testing.assert_close(layers["usual"](x), wanted, rtol=1e-4, atol=1e-5)


class LargestMLP(LlamaMLP):  # type: ignore[misc]
    """As in Gemma 3n: only the largest values of a token stay, so a part of the width cannot be computed alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = gate * (gate == gate.amax(-1, keepdim=True))
        result: Tensor = self.down_proj(gate * self.up_proj(x))
        return result


class RoutedMLP(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * weights
        return result


def test_an_mlp_that_compares_its_values_is_not_divided() -> None:
    config = LlamaConfig(**SIZES)
    assert needs_whole_width(LargestMLP(config))
    for kind in (LlamaMLP, ReluMLP, RoutedMLP):
        assert not needs_whole_width(kind(config)), kind
    assert not needs_whole_width(Phi3MLP(Phi3Config(**SIZES)))


class OwnLinear(nn.Linear):
    """A subclass may compute something else."""


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.own = nn.Linear(8, 4, bias=False), nn.Linear(8, 4), OwnLinear(8, 4)
        self.other_dtype = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.read.weight.T + self.called(x) + self.own(x) + self.other_dtype(x.double()).float()


def test_linear_layers_that_are_only_called_are_replaced() -> None:
    """Inflight's layers keep no weight that the code around them could read."""
    reader, outside = Reader(), nn.Linear(8, 4)
    model: Any = nn.ModuleDict({"layers": nn.ModuleList([reader]), "outside": outside})
    replace_linears(model, "layers", layer_context(torch.float32))
    assert [name for name, each in reader.named_children() if isinstance(each, Adapter)] == ["called"]
    assert model["outside"] is outside


def test_projections_of_one_input_are_one_multiplication() -> None:
    parts = {name: OutputShard(total=size, start=0, size=size) for name, size in (("q", 4), ("k", 2), ("v", 3))}
    column = ColumnParallelLinear(8, parts, bias=False, context=layer_context(torch.float32))
    weight = torch.randn(9, 8)
    column.weight.data.copy_(weight)
    column.finish_loading()
    calls, multiply = [], column.multiply

    def counted(x: Tensor, *arguments: object) -> Tensor:
        calls.append(x)
        return multiply(x, *arguments)  # type: ignore[arg-type]

    column.multiply = counted  # type: ignore[assignment]
    query, key, value = FusedAdapter(column).with_parts()
    x, other = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for projection, rows in ((query, slice(0, 4)), (key, slice(4, 6)), (value, slice(6, 9))):
        torch.testing.assert_close(projection(x), x @ weight[rows].T)
    assert len(calls) == 1
    torch.testing.assert_close(query(x), x @ weight[:4].T)
    torch.testing.assert_close(key(other), other @ weight[4:6].T)
    torch.testing.assert_close(value(other), other @ weight[6:].T)
    assert len(calls) == 3


def test_a_model_keeps_its_other_modules() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=50, num_attention_heads=2, num_key_value_heads=2))
    before = {name for name, _ in model.named_parameters()}
    replace_norms(model, layer_context(torch.float32))
    assert {name for name, _ in model.named_parameters()} == before


def test_ranks_that_are_threads_read_source_code_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` makes syntax trees of files. Python 3.11 fails at times if two threads do this at once."""
    models = [nn.ModuleDict({"layers": nn.ModuleList([LlamaMLP(LlamaConfig(**SIZES))])}) for _ in range(2)]
    inside, together = threading.Lock(), []

    def read(_: type[object]) -> str:
        together.append(not inside.acquire(blocking=False))
        time.sleep(0.05)
        if not together[-1]:
            inside.release()
        return ""

    build._source.cache_clear()
    monkeypatch.setattr(inspect, "getsource", read)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda model: replace_linears(model, "layers", layer_context(torch.float32)), models))
    build._source.cache_clear()
    assert together and not any(together)
