"""`DenseAndMoe`: a gated MLP and a mixture of experts side by side, as in Gemma 4. Both read the residual stream."""

from collections.abc import Iterator

from torch import Tensor, nn

from inflight.config.experts import DenseAndMoeSpec
from inflight.layers.context import LayerContext
from inflight.layers.gated_mlp import GatedMLP
from inflight.layers.moe import FusedMoE
from inflight.layers.norm import RMSNorm
from inflight.layers.weights import Loadable, WeightSlots


class DenseAndMoe(Loadable):
    """Computes norm(dense(norm(x))) + norm(moe(norm(x))). The router reads another norm of x, divided by the square root of the
    hidden size. In the checkpoint, the norms are beside `mlp`, and the norm of the router is `mlp.gate_norm`.
    """

    def __init__(self, hidden_size: int, spec: DenseAndMoeSpec, context: LayerContext) -> None:
        super().__init__()
        sizes = hidden_size, spec.eps, context
        self.before_dense, self.after_dense = RMSNorm(*sizes), RMSNorm(*sizes)
        self.before_moe, self.after_moe = RMSNorm(*sizes), RMSNorm(*sizes)
        self.before_router = RMSNorm(*sizes)
        self.dense = GatedMLP(hidden_size, spec.dense, context)
        self.moe = FusedMoE(hidden_size, spec.moe, context)
        self.hidden_size, self.ops = hidden_size, context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        layer = prefix.rpartition(".")[0]
        yield from self.before_dense.weight_slots(f"{layer}.pre_feedforward_layernorm")
        yield from self.dense.weight_slots(prefix)
        yield from self.after_dense.weight_slots(f"{layer}.post_feedforward_layernorm_1")
        yield from self.before_router.weight_slots(f"{prefix}.gate_norm")
        yield from self.before_moe.weight_slots(f"{layer}.pre_feedforward_layernorm_2")
        yield from self.moe.weight_slots(prefix)
        yield from self.after_moe.weight_slots(f"{layer}.post_feedforward_layernorm_2")

    def separate_units(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        yield from self.moe.separate_units(prefix)

    def finish_loading(self) -> None:
        super().finish_loading()
        scaled = self.before_router.weight.data * self.hidden_size**-0.5
        self.before_router.weight = nn.Parameter(scaled, False)

    def forward(self, stream: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, in new memory."""
        out: Tensor = self.after_dense(self.dense(self.before_dense(stream)))
        of_experts = self.after_moe(self.moe(self.before_moe(stream), self.before_router(stream)))
        self.ops.add_and_scale(out, of_experts, None)
        return out
