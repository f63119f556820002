"""`GatedDeltaMixer`: a recurrent layer with the gated delta rule (kernels/gated_delta.py), with its projections."""

from dataclasses import replace

import torch
from torch import Tensor

from inflight.config.mixers import GatedDeltaSpec
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights, gated_delta
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import MixerPlace
from inflight.layers.recurrent_mixer import RecurrentMixer, float_weight
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.sharding import OutputShard, fused, head_shard
from inflight.layers.weights import WeightSlot, WeightSlots


class GatedDeltaMixer(RecurrentMixer):
    """One multiplication computes queries, keys, values, gates, betas and steps. Each rank has some of the heads."""

    name = "linear_attn"

    def __init__(self, spec: GatedDeltaSpec, place: MixerPlace) -> None:
        super().__init__()
        context = place.context
        hidden_size = place.architecture.hidden_size
        key = head_shard(spec.num_key_heads, spec.key_dim, context.tp)
        value = head_shard(spec.num_value_heads, spec.value_dim, context.tp)
        head = head_shard(spec.num_value_heads, 1, context.tp)
        self.channels = fused("in_proj_qkv", {"query": key, "key": key, "value": value})
        self.in_proj = ColumnParallelLinear(
            hidden_size,
            _grouped(spec, context.tp)
            if spec.is_grouped
            else {**self.channels, "in_proj_z": value, "in_proj_b": head, "in_proj_a": head},
            bias=False,
            context=context,
        )
        self.out_proj = RowParallelLinear(value.total, hidden_size, bias=False, context=context)
        self.shape = GatedDeltaShape(
            num_key_heads=key.size // spec.key_dim,
            num_value_heads=head.size,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            kernel_size=spec.kernel_size,
        )
        self.state = RecurrentState(
            f"model.layers.{place.layer}.{self.name}",
            self.shape.state_shapes,
            (torch.float32, context.dtype),
            context.backend,
        )
        self.head = head
        self.eps = place.architecture.rms_norm_eps
        self.ops = context.ops
        self.conv = float_weight(context, self.shape.num_channels, 1, spec.kernel_size)
        self.norm = float_weight(context, spec.value_dim)
        self.log_rates = float_weight(context, head.size)
        self.step_bias = float_weight(context, head.size)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        offset = 0
        for part in self.channels.values():
            weight = self.conv.data[offset : offset + part.size]
            yield (
                f"{prefix}.conv1d.weight",
                WeightSlot(shape=(part.total, *weight.shape[1:]), destination=weight, start=part.start),
            )
            offset += part.size
        for name, values in (("A_log", self.log_rates.data), ("dt_bias", self.step_bias.data)):
            yield (f"{prefix}.{name}", WeightSlot(shape=(self.head.total,), destination=values, start=self.head.start))
        weight = self.norm.data
        yield f"{prefix}.norm.weight", WeightSlot(shape=tuple(weight.shape), destination=weight, is_scale=True)

    def finish_loading(self) -> None:
        super().finish_loading()
        self.weights = GatedDeltaWeights(
            conv=self.conv.data[:, 0].T.contiguous(),
            rates=self.log_rates.data.exp(),
            step_bias=self.step_bias.data,
            norm=self.norm.data,
            eps=self.eps,
        )
        self.kernel = None
        if isinstance(self.ops, CpuLayerOps) and CpuGatedDelta.supports(self.shape, self.in_proj.dtype):
            self.kernel = CpuGatedDelta(self.ops.kernels, self.shape, self.weights)

    def compute_piece(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """See `RecurrentMixer`. The state is the matrices of the value heads, and the last inputs of the convolution."""
        matrices, inputs = state
        mixed, matrices, inputs = gated_delta(rows, matrices, inputs, self.shape, self.weights)
        return mixed.flatten(1), matrices, inputs


def _grouped(spec: GatedDeltaSpec, tp: TensorParallelGroup) -> dict[str, OutputShard]:
    """The projections, if the checkpoint has one tensor with the query, key, values and gates of each key head in turn, and
    another with its betas and steps."""
    per_key_head = spec.num_value_heads // spec.num_key_heads
    values = per_key_head * spec.value_dim
    found: dict[str, OutputShard] = {}
    for source, sizes in (
        ("in_proj_qkvz", {"query": spec.key_dim, "key": spec.key_dim, "value": values, "gate": values}),
        ("in_proj_ba", {"beta": per_key_head, "step": per_key_head}),
    ):
        group = sum(sizes.values())
        first = 0
        whole = head_shard(spec.num_key_heads, group, tp)
        starts = torch.arange(0, whole.size, group, dtype=torch.int64, device="cpu")
        for name, size in sizes.items():
            rows = starts[:, None] + first + torch.arange(size, dtype=torch.int64, device="cpu")
            found[name] = replace(whole, size=rows.numel(), order=rows.flatten(), source=source)
            first += size
    return found
