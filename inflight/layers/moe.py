"""`FusedMoE`: a mixture of experts. `Router`: the linear layer whose logits decide which experts compute a token.

A token is computed by the experts that its router chooses, and by the shared expert if there is one. Their results are weighted
and added in float32, the experts in the order of their scores and then the shared one, so that a token's result does not depend
on the other tokens of a step.

Each tensor-parallel rank has a part of every expert: rows of gate and up, and columns of down, as in `GatedMLP`. The router is
whole on each rank.

Experts are loaded in groups of some hundred megabytes, one after the other (`Loadable.separate_units`), so that only one group
at a time is in memory twice.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.config.experts import MoeSpec
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.expert_choice import choose_experts, compute_experts
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.linear_method import PreparedExperts
from inflight.layers.sharding import OutputShard, even_shard
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots

_GROUP_BYTES = 256 << 20  # of the weights of a group of experts, before they are packed


class Router(ColumnParallelLinear):
    """hidden [num_tokens, hidden_size] -> float32 [num_tokens, num_experts], and one more logit if
    the shared expert has a gate. Its weights are never quantized, because a small difference may change the choice.

    `choice_bias`, `expert_scale`: float32 [num_experts], see `RouterSpec.has_choice_bias` and `has_expert_scale`; None without.
    In the checkpoint they are called `e_score_correction_bias` and `per_expert_scale`.
    """

    keeps_floats = True

    def __init__(self, hidden_size: int, spec: MoeSpec, context: LayerContext) -> None:
        sizes = {"gate": spec.num_experts} | ({"shared_expert_gate": 1} if spec.has_shared_gate else {})
        parts = {name: OutputShard(total=size, start=0, size=size) for name, size in sizes.items()}
        context = replace(context, linear=context.floats)
        super().__init__(hidden_size, parts, bias=spec.router.bias, context=context)
        zeros = torch.zeros(spec.num_experts, dtype=torch.float32, device=context.weight_device)
        self.choice_bias = nn.Parameter(zeros, False) if spec.router.has_choice_bias else None
        self.choice_bias_is_row = spec.router.choice_bias_is_row
        ones = torch.ones_like(zeros)
        self.expert_scale = nn.Parameter(ones, False) if spec.router.has_expert_scale else None

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        if self.choice_bias is not None:
            bias = self.choice_bias.data.unsqueeze(0) if self.choice_bias_is_row else self.choice_bias.data
            yield f"{prefix}.e_score_correction_bias", WeightSlot(shape=tuple(bias.shape), destination=bias)
        if self.expert_scale is not None:
            scale = self.expert_scale.data
            yield f"{prefix}.per_expert_scale", WeightSlot(shape=tuple(scale.shape), destination=scale, is_scale=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden, torch.float32)


class Expert(Loadable):
    """A rank's part of one expert: a gated MLP. The caller adds the results of all ranks."""

    def __init__(self, hidden_size: int, size: int, spec: MoeSpec, context: LayerContext) -> None:
        super().__init__()
        part = even_shard(size, context.tp)
        parts = {"gate_proj": part, "up_proj": part}
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, parts, bias=spec.bias, context=context, gate=spec.activation
        )
        self.down_proj = RowParallelLinear(size, hidden_size, bias=spec.bias, context=context)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size] -> float32 [num_tokens, hidden_size]"""
        return self.down_proj.multiply(self.gate_up_proj(hidden), torch.float32)


class ExpertGroup(Loadable):
    """Experts that are loaded together. Their names are their indices in the layer."""

    def __init__(self, first: int, experts: list[Expert]) -> None:
        super().__init__()
        for index, expert in enumerate(experts, first):
            self.add_module(str(index), expert)


class FusedMoE(Loadable):
    """The experts that compute a token, with their router."""

    def __init__(self, hidden_size: int, spec: MoeSpec, context: LayerContext) -> None:
        super().__init__()
        self.router = Router(hidden_size, spec, context)
        make = (hidden_size, spec.size, spec, context)
        at_once = max(1, _GROUP_BYTES // (3 * hidden_size * spec.size // context.tp.size * context.dtype.itemsize))
        starts = range(0, spec.num_experts, at_once)
        self.groups = nn.ModuleList(
            ExpertGroup(start, [Expert(*make) for _ in range(min(at_once, spec.num_experts - start))])
            for start in starts
        )
        self.shared_expert = Expert(hidden_size, spec.shared_size, spec, context) if spec.shared_size else None
        self.spec, self.dtype, self.tp, self.ops = spec, context.dtype, context.tp, context.ops
        self.linear = context.linear

    def separate_units(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        for group in self.groups:
            assert isinstance(group, ExpertGroup)
            yield f"{prefix}.experts", group

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from self.router.weight_slots(f"{prefix}.gate")
        if self.shared_expert is not None:
            yield from self.shared_expert.weight_slots(f"{prefix}.shared_expert")

    def finish_loading(self) -> None:
        self.router.finish_loading()
        loaded = (expert for group in self.groups for expert in group.children())
        self.experts = [expert for expert in loaded if isinstance(expert, Expert)]
        if self.shared_expert is not None:
            self.shared_expert.finish_loading()
            self.experts.append(self.shared_expert)
        self.kernel = self._make_cpu_kernel()
        self.together = None if self.kernel is not None else self._prepare_together()

    def _prepare_together(self) -> PreparedExperts | None:
        routed = self.experts[: self.spec.num_experts]
        gate_up, down = ([getattr(each, name).multiply for each in routed] for name in ("gate_up_proj", "down_proj"))
        together = self.linear.prepare_experts(gate_up, down, self.spec.activation, self.shared_expert)
        if together is not None:
            for expert in routed:
                del expert.gate_up_proj.multiply, expert.down_proj.multiply  # `together` has copies of their weights
        return together

    def _make_cpu_kernel(self) -> CpuExperts | None:
        """Returns None if the C++ kernels are not used, or do not support a size."""
        gate_up = [linear for each in self.experts if isinstance(linear := each.gate_up_proj.multiply, PackedLinear)]
        down = [linear for each in self.experts if isinstance(linear := each.down_proj.multiply, PackedLinear)]
        are_packed = len(gate_up) == len(down) == len(self.experts)
        if not isinstance(self.ops, CpuLayerOps) or not are_packed or not CpuExperts.supports(self.spec):
            return None
        vectors = self.router.choice_bias, self.router.expert_scale
        return CpuExperts(self.ops.kernels, self.spec, gate_up, down, self.dtype, *vectors)

    def forward(self, hidden: Tensor, router_input: Tensor | None = None) -> Tensor:
        """`router_input`: what the router reads, if that is not `hidden`. Both are [num_tokens, hidden_size]."""
        logits = self.router(hidden if router_input is None else router_input)
        return self.tp.all_reduce(self.compute(hidden, self.choose(logits)))

    def choose(self, logits: Tensor) -> Tensor:
        """The choices (kernels/expert_choice.py) for what `Router` returns."""
        if self.kernel is not None:
            return self.kernel.choose(logits)
        return choose_experts(logits, self.spec, self.router.choice_bias, self.router.expert_scale)

    def compute(self, hidden: Tensor, choices: Tensor) -> Tensor:
        """The weighted sum of this rank's parts of the chosen experts, [num_tokens, hidden_size]."""
        if self.kernel is not None:
            return self.kernel(hidden, choices)
        if self.together is not None:
            return self.together(hidden, choices)
        return compute_experts(hidden, choices, lambda index, rows: self.experts[index](rows)).to(self.dtype)
