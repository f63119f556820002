"""An MLP without a gate, whole and divided among ranks, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, RELU, SILU
from inflight.config.plain_mlp import PlainMlpSpec
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.gate import ACTIVATIONS
from inflight.layers.plain_mlp import PlainMLP
from tests.unit.layers.contexts import layer_context


def made(spec: PlainMlpSpec, weights: dict[str, Tensor], tp: TensorParallelGroup | None = None) -> PlainMLP:
    mlp = PlainMLP(20, spec, layer_context(torch.float32, tp))
    slots = dict(mlp.weight_slots("mlp"))
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert slot.shape == weights[name].shape
        slot.destination.copy_(weights[name].narrow(slot.dim, slot.start, slot.size))
    mlp.finish_loading()
    return mlp


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [GELU, GELU_TANH, RELU, SILU])
def test_equals_the_formula(activation: str, bias: bool) -> None:
    spec = PlainMlpSpec(size=48, activation=activation, bias=bias)
    assert (spec.num_features, spec.fits(2), spec.fits(5), str(spec)) == (96, True, False, "an intermediate size of 48")
    shapes = {"up_proj.weight": (48, 20), "up_proj.bias": (48,), "down_proj.weight": (20, 48), "down_proj.bias": (20,)}
    generator = torch.Generator().manual_seed(0)
    drawn = {f"mlp.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: weight for name, weight in drawn.items() if bias or name.endswith("weight")}
    x = torch.randn(7, 20, generator=generator)
    wide = {name: weight.double() for name, weight in weights.items()}
    zero = torch.zeros(1, dtype=torch.float64)
    inner = x.double() @ wide["mlp.up_proj.weight"].T + wide.get("mlp.up_proj.bias", zero)
    truth = ACTIVATIONS[activation](inner) @ wide["mlp.down_proj.weight"].T + wide.get("mlp.down_proj.bias", zero)
    torch.testing.assert_close(made(spec, weights)(x).double(), truth, rtol=1e-5, atol=1e-4)
