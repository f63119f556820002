"""`GatedMLP`: the MLP of most families, with a gate for each of its inner numbers."""

from torch import Tensor

from inflight.config.architecture import GatedMlpSpec
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.sharding import even_shard, fused
from inflight.layers.weights import Loadable


class GatedMLP(Loadable):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: GatedMlpSpec, context: LayerContext) -> None:
        super().__init__()
        part = even_shard(spec.size, context.tp)
        self.size = part.size
        parts = {"gate_proj": part, "up_proj": part}
        if spec.is_fused:
            parts = fused("gate_up_proj", parts)
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, parts, bias=spec.bias, context=context, gate=spec.activation
        )
        self.down_proj = RowParallelLinear(spec.size, hidden_size, bias=spec.bias, context=context)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out
