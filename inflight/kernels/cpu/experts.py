"""Mixtures of experts by the C++ kernels (experts.cpp). kernels/expert_choice.py has the formulas."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.config.experts import GROUP_SCORINGS, SCORINGS, MoeSpec
from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, ExpertRouter, Experts, LinearWeight
from inflight.kernels.cpu.limits import experts_problem, require_supported
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.recording import KernelLibrary


class CpuExperts:
    """The experts of a layer, in one call for each step. Keeps the weights, to which the kernels have pointers. Several threads
    may use it at once.

    Args:
        gate_up, down: the packed weights of each expert, or None if another rank has it. The last ones are those of the shared
            expert: `num_shared` parts, one for each rank that has a part of it.
        dtype: of hidden states.
        choice_bias, expert_scale: see `choose_experts`.

    Raises:
        ConfigError: the kernels do not support the experts.
    """

    def __init__(
        self,
        kernels: KernelLibrary,
        spec: MoeSpec,
        gate_up: Sequence[PackedLinear | None],
        down: Sequence[PackedLinear | None],
        dtype: torch.dtype,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
        *,
        num_shared: int | None = None,
    ) -> None:
        require_supported(experts_problem(spec.num_experts, spec.router.top_k))
        if num_shared is None:
            num_shared = int(spec.shared_size > 0)
        num_experts = spec.num_experts + num_shared
        held = [(first, second) for first, second in zip(gate_up, down, strict=True) if first and second]
        hidden_size = held[0][1].num_columns
        fits = len(gate_up) == num_experts and dtype in DTYPES
        for first, second in held:
            for each in (first, second):
                fits = fits and (each.dtype == dtype or not each.dtype.is_floating_point)
            fits = fits and first.weight.in_features == second.num_columns == hidden_size
            fits = fits and bool(first.weight.gate) and not second.weight.gate
            fits = fits and first.num_columns == second.weight.in_features
        require(
            fits, "experts need weights of gate and up, and of down, with sizes and dtypes that fit", dtype, num_experts
        )
        require(spec.router.problem(spec.num_experts) is None, "the router must fit its experts", spec)
        for vector in (choice_bias, expert_scale):
            fits = vector is None or (vector.shape == (spec.num_experts,) and vector.is_contiguous())
            fits = fits and (vector is None or vector.dtype == torch.float32)
            require(fits, "a bias or scale of the router needs a float32 for each expert", vector)
        self.kernels = kernels
        self._products, self._kept = (gate_up, down), (choice_bias, expert_scale)
        self._gate_up, self._down = (
            (LinearWeight * num_experts)(*(each.weight if each else _without_weight(like) for each in weights))
            for weights, like in zip((gate_up, down), held[0], strict=True)
        )
        self._router = ExpertRouter(
            spec.num_experts,
            spec.router.top_k,
            spec.router.num_groups,
            spec.router.top_groups,
            *(None if vector is None else vector.data_ptr() for vector in (choice_bias, expert_scale)),
            spec.router.scale,
            spec.router.sum_offset,
            spec.router.jitter,
            SCORINGS.index(spec.router.scoring),
            GROUP_SCORINGS.index(spec.router.group_scoring),
            spec.router.renormalizes,
            num_shared,
            spec.has_shared_gate,
        )
        self._num_logits = spec.num_experts + spec.has_shared_gate
        self._num_choices = spec.router.top_k + num_shared
        self.layer = Experts(
            ctypes.addressof(self._gate_up),
            ctypes.addressof(self._down),
            None,
            num_experts,
            spec.num_experts,
            self._num_choices,
            hidden_size,
            max(first.num_columns for first, _ in held),
            DTYPES[dtype],
        )
        self._hidden_size, self._dtype, self._num_experts = hidden_size, dtype, num_experts

    @staticmethod
    def supports(spec: MoeSpec) -> bool:
        return experts_problem(spec.num_experts, spec.router.top_k) is None

    def product_of(self, expert: int) -> tuple[PackedLinear, PackedLinear] | None:
        """The products with gate and up, and with down, of an expert that this rank had from the start; None: it had not."""
        gate_up, down = (products[expert] for products in self._products)
        return None if gate_up is None or down is None else (gate_up, down)

    def hold(self, expert: int, gate_up: LinearWeight, down: LinearWeight) -> None:
        """This rank has an expert from now on. The caller keeps its weights."""
        self._gate_up[expert], self._down[expert] = gate_up, down

    def let_go(self, expert: int) -> None:
        """This rank does not have the expert any more."""
        for weights in (self._gate_up, self._down):
            weights[expert].packed = weights[expert].bias = None

    def choose(self, logits: Tensor) -> Tensor:
        """As `choose_experts`."""
        fits = logits.dtype == torch.float32 and logits.shape[1] == self._num_logits and logits.stride(1) == 1
        require(fits, f"choose_experts needs {self._num_logits} logits in float32 for each row", logits)
        choices = torch.empty((len(logits), self._num_choices, 2), dtype=torch.int32, device="cpu")
        self.kernels.inflight_choose_experts(
            logits.data_ptr(), logits.stride(0), choices.data_ptr(), len(logits), self._router
        )
        return choices

    def __call__(self, hidden: Tensor, choices: Tensor) -> Tensor:
        """As `compute_experts`, in the dtype of the hidden states."""
        self.check(hidden, choices)
        num_rows = len(hidden)
        results = torch.empty((num_rows, self._num_choices, self._hidden_size), dtype=torch.float32, device="cpu")
        out = torch.empty((num_rows, self._hidden_size), dtype=self._dtype, device="cpu")
        self.kernels.inflight_experts(
            hidden.data_ptr(), hidden.stride(0), choices.data_ptr(), results.data_ptr(), num_rows, self.layer
        )
        sizes = num_rows, self._num_choices, self._hidden_size
        self.kernels.inflight_add_experts(results.data_ptr(), out.data_ptr(), *sizes, DTYPES[self._dtype])
        return out

    def check(self, hidden: Tensor, choices: Tensor) -> None:
        """Requires that these are the inputs of a call."""
        num_rows = len(hidden)
        fits = hidden.shape == (num_rows, self._hidden_size) and hidden.stride(1) == 1 and hidden.dtype == self._dtype
        fits = fits and choices.shape == (num_rows, self._num_choices, 2) and choices.dtype == torch.int32
        require(
            fits and choices.is_contiguous(), "experts need rows of the hidden size and their choices", hidden, choices
        )
        _require_experts(choices, self._num_experts)


def _without_weight(like: PackedLinear) -> LinearWeight:
    """An expert that another rank has: the kernels read its sizes, which are those of the other experts."""
    absent = LinearWeight.from_buffer_copy(like.weight)
    absent.packed = absent.bias = None
    return absent


def _require_experts(choices: Tensor, num_experts: int) -> None:
    """Requires that each choice is the index of an expert. Like `require_rows`, it calls no operation of torch."""
    if indices := (ctypes.c_int32 * choices.numel()).from_address(choices.data_ptr())[::2]:
        given = f"{num_experts} experts, and indices from {min(indices)} to {max(indices)}"
        require(min(indices) >= 0 and max(indices) < num_experts, "experts must exist", given)
