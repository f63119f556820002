"""`RecurrentMixer`: the base class of recurrent layers. It computes a step, by a C++ kernel or piece by piece in torch."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from inflight.attention.backend import LayerStep
from inflight.attention.cpu_paged import CpuStateMetadata
from inflight.attention.metadata import StateMetadata
from inflight.kernels.cpu.functions import AttentionStep
from inflight.kernels.layer_ops import LayerOps
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import Mixer
from inflight.layers.recurrent_state import RecurrentState

# (rows of the step, states of all blocks, where each tensor of a state begins, which rows belong to which sequence) -> result
RecurrentKernel = Callable[[Tensor, Tensor, list[int], AttentionStep], Tensor]


class RecurrentMixer(Mixer):
    """A projection of all tokens, the recurrence, and a projection of its results. Subclasses set the attributes.

    Attributes:
        kernel: None if torch computes the recurrence.
    """

    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear
    state: RecurrentState
    kernel: RecurrentKernel | None
    ops: LayerOps

    @abstractmethod
    def compute_piece(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The recurrence over tokens of one sequence.

        Args:
            rows: [num_tokens, width], from the first projection.
            state: the tensors of the state before these tokens.

        Returns:
            [num_tokens, the second projection's in_features], and the tensors of the state after these tokens.
        """

    def forward(self, hidden: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        projected = self.in_proj(hidden)
        metadata = step.attn_metadata[self.state.group_index]
        assert isinstance(metadata, StateMetadata), f"metadata of another layer: {type(metadata).__name__}"
        if self.kernel is not None and isinstance(metadata, CpuStateMetadata):
            assert self.state.kv_cache is not None, f"{self.state.layer_name} has no cache yet"
            mixed = self.kernel(projected, self.state.kv_cache, self.state.offsets, metadata.step)
        else:
            mixed = self._in_torch(projected, metadata)
        out: Tensor = self.out_proj(mixed if rows is None else self.ops.select_rows(mixed, rows))
        return out

    def _in_torch(self, projected: Tensor, metadata: StateMetadata) -> Tensor:
        out = projected.new_empty(len(projected), self.out_proj.in_features)
        for tokens, source, target in metadata.pieces():
            state = self.state.tensors(target if source is None else source)
            if source is None:
                state = [torch.zeros_like(each) for each in state]
            out[tokens], *after = self.compute_piece(projected[tokens], *state)
            for kept, new in zip(self.state.tensors(target), after, strict=True):
                kept.copy_(new)
        return out


def float_weight(context: LayerContext, *shape: int) -> nn.Parameter:
    """A weight that is kept in float32, whatever the model's dtype is."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=context.device), False)
