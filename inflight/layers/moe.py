"""`FusedMoE`: a mixture of experts. `Router`: the linear layer whose logits decide which experts compute a token.

A token is computed by the experts that its router chooses, and by the shared expert if there is one. Their results are weighted
and added in float32, the experts in the order of their scores and then the shared one, so that a token's result does not depend
on the other tokens of a step.

Each tensor-parallel rank has a part of every expert: rows of gate and up, and columns of down, as in `GatedMLP`. The router is
whole on each rank. With expert parallelism (`LayerContext.ep`) a rank has whole experts instead, but not all of them. The
shared expert is divided as before, and its parts are added one after the other.

Experts are loaded in groups of some hundred megabytes, one after the other (`Loadable.separate_units`), so that only one group
at a time is in memory twice.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from inflight.config.experts import MoeSpec
from inflight.distributed.expert_parallel import ExpertParallelGroup
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.expert_exchange import exchange_experts
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.expert_choice import choose_experts, compute_experts
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
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
    """Experts that are loaded together: index in the layer, which is the name -> expert."""

    def __init__(self, experts: dict[int, Expert]) -> None:
        super().__init__()
        for index, expert in experts.items():
            self.add_module(str(index), expert)


class FusedMoE(Loadable):
    """The experts that compute a token, with their router."""

    def __init__(self, hidden_size: int, spec: MoeSpec, context: LayerContext) -> None:
        super().__init__()
        self.router = Router(hidden_size, spec, context)
        self.ep, self.hidden_size = context.ep, hidden_size
        held = range(spec.num_experts) if self.ep is None else self.ep.local_experts(spec.num_experts)
        of_expert = context if self.ep is None else replace(context, tp=TensorParallelGroup())
        expert_bytes = 3 * hidden_size * spec.size // of_expert.tp.size * context.dtype.itemsize
        at_once = max(1, _GROUP_BYTES // expert_bytes)
        groups = (held[start : start + at_once] for start in range(0, len(held), at_once))
        self.groups = nn.ModuleList(
            ExpertGroup({index: Expert(hidden_size, spec.size, spec, of_expert) for index in group}) for group in groups
        )
        # Without weights in the checkpoint: so their memory is known before it is taken (kernels/cpu/expert_balance.py).
        num_places = 0 if self.ep is None else self.ep.num_own_places
        self.places = nn.ModuleList(Expert(hidden_size, spec.size, spec, of_expert) for _ in range(num_places))
        self.shared_expert = Expert(hidden_size, spec.shared_size, spec, context) if spec.shared_size else None
        self.spec, self.dtype, self.tp, self.ops = spec, context.dtype, context.tp, context.ops
        # Parts of the shared expert that have a choice of their own, and which of them is here.
        self.num_shared = 0 if not spec.shared_size else 1 if self.ep is None else context.tp.size
        self.shared_index = 0 if self.ep is None else context.tp.rank
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
        del self.places
        self.router.finish_loading()
        loaded = ((int(name), expert) for group in self.groups for name, expert in group.named_children())
        self.experts = {index: expert for index, expert in loaded if isinstance(expert, Expert)}
        if self.shared_expert is not None:
            self.shared_expert.finish_loading()
            self.experts[self.spec.num_experts + self.shared_index] = self.shared_expert
        self.kernel = self._make_cpu_kernel()
        self.together = None if self.kernel is not None else self._prepare_together()

    def _prepare_together(self) -> PreparedExperts | None:
        if self.ep is not None:
            return None
        routed = [self.experts[index] for index in range(self.spec.num_experts)]
        gate_up, down = ([getattr(each, name).multiply for each in routed] for name in ("gate_up_proj", "down_proj"))
        together = self.linear.prepare_experts(gate_up, down, self.spec.activation, self.shared_expert)
        if together is not None:
            for expert in routed:
                del expert.gate_up_proj.multiply, expert.down_proj.multiply  # `together` has copies of their weights
        return together

    def _make_cpu_kernel(self) -> CpuExperts | None:
        """Returns None if the C++ kernels are not used, or do not support a size."""
        linears = [linear for each in self.experts.values() for linear in (each.gate_up_proj, each.down_proj)]
        are_packed = all(isinstance(linear.multiply, PackedLinear) for linear in linears)
        if not isinstance(self.ops, CpuLayerOps) or not are_packed or not CpuExperts.supports(self.spec):
            return None
        experts = [self.experts.get(index) for index in range(self.spec.num_experts + self.num_shared)]
        gate_up = [None if each is None else _packed(each.gate_up_proj) for each in experts]
        down = [None if each is None else _packed(each.down_proj) for each in experts]
        vectors = self.router.choice_bias, self.router.expert_scale
        return CpuExperts(self.ops.kernels, self.spec, gate_up, down, self.dtype, *vectors, num_shared=self.num_shared)

    def forward(self, hidden: Tensor, router_input: Tensor | None = None) -> Tensor:
        """`router_input`: what the router reads, if that is not `hidden`. Both are [num_tokens, hidden_size]."""
        logits = self.router(hidden if router_input is None else router_input)
        choices = self.choose(logits)
        if self.ep is not None:
            return self._compute_with_others(self.ep, hidden, choices)
        return self.tp.all_reduce(self.compute(hidden, choices))

    def compute_for_others(self) -> None:
        """In a step in which only other replicas have rows: compute this rank's experts for them."""
        assert self.ep is not None, "no other rank needs the experts of this one"
        hidden = torch.empty((0, self.hidden_size), dtype=self.dtype, device="cpu")
        choices = torch.empty((0, self.spec.router.top_k + self.num_shared, 2), dtype=torch.int32, device="cpu")
        self._compute_with_others(self.ep, hidden, choices)

    def choose(self, logits: Tensor) -> Tensor:
        """The choices (kernels/expert_choice.py) for what `Router` returns."""
        if self.kernel is not None:
            return self.kernel.choose(logits)
        choices = choose_experts(logits, self.spec, self.router.choice_bias, self.router.expert_scale)
        return choices if self.num_shared < 2 else _with_parts(choices, self.num_shared)

    def compute(self, hidden: Tensor, choices: Tensor) -> Tensor:
        """The weighted sum of this rank's parts of the chosen experts, [num_tokens, hidden_size]."""
        if self.kernel is not None:
            return self.kernel(hidden, choices)
        if self.together is not None:
            return self.together(hidden, choices)
        return compute_experts(hidden, choices, lambda index, rows: self.experts[index](rows)).to(self.dtype)

    def _compute_with_others(self, ep: ExpertParallelGroup, hidden: Tensor, choices: Tensor) -> Tensor:
        """The weighted sum of the chosen experts of all ranks, [num_tokens, hidden_size]."""
        if self.kernel is not None and ep.rows is not None:
            assert isinstance(self.ops, CpuLayerOps), "the kernels compute the experts"
            rows = ep.rows
            return exchange_experts(self.ops.kernels, self.kernel, rows.exchange, rows.run, hidden, choices)

        def compute(index: int, rows: Tensor) -> Tensor | None:
            expert = self.experts.get(index)
            return None if expert is None else expert(rows)

        return ep.sum_of_results(hidden, choices, self.spec.num_experts, compute).to(self.dtype)


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear.multiply, PackedLinear)
    return linear.multiply


def _with_parts(choices: Tensor, num_parts: int) -> Tensor:
    """`choices`, whose last one is the shared expert, with a choice for each of its parts: the same weight, and indices that
    count on."""
    shared = choices[:, -1:].repeat(1, num_parts, 1)
    shared[..., 0] += torch.arange(num_parts, dtype=torch.int32, device=choices.device)
    return torch.cat([choices[:, :-1], shared], dim=1)
