"""`LayerNorm` over the hidden size. `make_norm`: the norm that a model has, LayerNorm or RMSNorm.

Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
"""

import torch
from torch import Tensor, nn

from inflight.config.architecture import ModelArchitecture
from inflight.kernels.encoder_ops import layer_norm
from inflight.layers.context import LayerContext
from inflight.layers.norm import RMSNorm
from inflight.layers.weights import WeightSlot, WeightSlots


class LayerNorm(RMSNorm):
    """LayerNorm over the last dimension, which has `size` elements."""

    def __init__(self, size: int, eps: float, context: LayerContext, *, has_bias: bool) -> None:
        super().__init__(size, eps, context)
        self.bias = nn.Parameter(torch.zeros_like(self.weight.data), False) if has_bias else None

    def weight_slots(self, prefix: str) -> WeightSlots:
        for name, weight in self.named_parameters():
            is_scale = name == "weight"
            yield f"{prefix}.{name}", WeightSlot(shape=tuple(weight.shape), destination=weight.data, is_scale=is_scale)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(self.ops, None, x, self.weight, self.bias, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return layer_norm(self.ops, x, residual, self.weight, self.bias, self.eps)


def make_norm(architecture: ModelArchitecture, context: LayerContext, *, reads_stream: bool = False) -> RMSNorm:
    """A norm over the hidden size. `reads_stream`: its input is the residual stream, and not what a layer adds to it."""
    eps = architecture.stream_eps if reads_stream and architecture.stream_eps is not None else architecture.rms_norm_eps
    size = architecture.hidden_size
    if architecture.has_layer_norm:
        return LayerNorm(size, eps, context, has_bias=architecture.norm_bias)
    return RMSNorm(size, eps, context, offset=architecture.norm_offset)


def stored_name(layer: str, name: str) -> str:
    """The whole name of a part of a layer, for example of "model.layers.3". See `NormNames`."""
    if not name.startswith("model."):
        return f"{layer}.{name}"
    return name.format(previous=int(layer.rpartition(".")[2]) - 1)
