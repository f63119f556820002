"""`PlainMLP`: an MLP without a gate, as encoders have it."""

from torch import Tensor

from inflight.config.plain_mlp import PlainMlpSpec
from inflight.kernels.encoder_ops import activate, end_with_activation
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.sharding import even_shard
from inflight.layers.weights import Loadable


class PlainMLP(Loadable):
    """Computes down(activation(up(x)))."""

    def __init__(self, hidden_size: int, spec: PlainMlpSpec, context: LayerContext) -> None:
        super().__init__()
        parts = {"up_proj": even_shard(spec.size, context.tp)}
        self.up_proj = ColumnParallelLinear(hidden_size, parts, bias=spec.bias, context=context)
        self.down_proj = RowParallelLinear(spec.size, hidden_size, bias=spec.bias, context=context)
        self.activation, self.ops = spec.activation, context.ops
        self.is_activated = False  # whether the product with `up_proj` ends with the activation

    def finish_loading(self) -> None:
        super().finish_loading()
        self.is_activated = end_with_activation(self.up_proj.multiply, self.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up_proj(hidden)
        if not self.is_activated:
            activate(self.ops, inner, self.activation)
        out: Tensor = self.down_proj(inner)
        return out
