"""`VisionTower`: the interface of vision towers. `EncoderState`: an image on its way through the layers of a tower."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.config.vision import Grid, VisionSpec
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable
from inflight.models.vision.block import Heads, TowerBlock


@dataclass(kw_only=True)
class EncoderState:
    """An image on its way through the layers of a tower.

    Attributes:
        grid: frames, rows and columns of patches.
        residual: [num_patches, hidden_size] in the model's dtype, the residual stream.
        delta: the output of the last layer, which is not yet added to `residual`; None before the first layer.
        layer: how many layers are computed.
        heads: of the layer that is computed; None between two layers.
        num_done: of how many patches this layer's output is in `delta`.
        segments: the numbers of patches that see each other, for each group of neighbouring patches: frames or windows.
        rotation: of the queries and keys; None if the tower has no rotary embedding.
        features: what layers in the middle of the tower have given for the decoder, [num_tokens, out_size] each.
        order: int64 [num_patches]: if the patches are in another order than those of the image, the places that they had; else
            None.
    """

    grid: Grid
    residual: Tensor
    segments: Sequence[int]
    delta: Tensor | None = None
    layer: int = 0
    heads: Heads | None = None
    num_done: int = 0
    rotation: Rotation | None = None
    features: list[Tensor] = field(default_factory=list)
    order: Tensor | None = None

    def add_delta(self) -> None:
        """Adds the output of the last layer to the residual stream."""
        if self.delta is not None:
            self.residual.add_(self.delta)
            self.delta = None


class VisionTower(nn.Module, ABC):
    """Makes embeddings of an image for the decoder. Every rank of the first stage has the whole tower.

    The methods compute on the device of the weights, in one thread at a time. An image that is on its way through the layers
    needs only its `EncoderState`, so several images may be on their way.
    """

    blocks: nn.ModuleList

    def __init__(self, spec: VisionSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = context.dtype
        self.device = context.device
        self.ops = context.ops

    @abstractmethod
    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        """Makes embeddings of the patches and adds their positions.

        pixels: any dtype of floats, as the family's processor returns them: [channels, height, width], or [num_patches,
        patch_features]. `VisionSpec.grid_problem` is None for the grid.
        """

    def advance(self, state: EncoderState, num_slices: int) -> None:
        """Computes the next `num_slices` slices of layers (`VisionSpec.patches_of_slice`), or those that are left."""
        for _ in range(num_slices):
            if state.layer < self.spec.num_layers:
                self._compute_slice(state)

    def _compute_slice(self, state: EncoderState) -> None:
        block = self.blocks[state.layer]
        assert isinstance(block, TowerBlock)
        if state.heads is None:
            state.heads = block.begin(state.delta, state.residual, state.rotation)
            state.delta = torch.empty_like(state.residual)
        assert state.delta is not None
        rows = slice(state.num_done, min(state.num_done + self.spec.patches_of_slice, len(state.residual)))
        segments = self.segments_of(state, state.layer)
        state.delta[rows] = block(state.heads, state.residual, segments, rows.start, rows.stop)
        state.num_done = rows.stop
        if state.num_done == len(state.residual):
            state.heads, state.num_done = None, 0
            state.layer += 1
            self.after_layer(state)

    def segments_of(self, state: EncoderState, layer: int) -> Sequence[int]:
        """Which patches see each other in this layer: see `EncoderState.segments`."""
        return state.segments

    def after_layer(self, state: EncoderState) -> None:
        """Called when a layer is computed. Towers that have features of layers in the middle keep them here."""

    @abstractmethod
    def finish(self, state: EncoderState) -> Tensor:
        """Returns [num_tokens, out_size * (1 + num_deepstack)] in the model's dtype: the embeddings of the tokens, then the
        features for each of the first decoder layers. All layers are computed."""

    def encode(self, pixels: Tensor, grid: Grid) -> Tensor:
        """`begin`, `advance` by all slices, `finish`."""
        state = self.begin(pixels, grid)
        self.advance(state, self.spec.num_slices(grid))
        return self.finish(state)

    @abstractmethod
    def load_units(self) -> list[tuple[str, Loadable]]:
        """See `CausalLM.load_units`."""

    def block_units(self, prefix: str) -> list[tuple[str, Loadable]]:
        """The layers, whose names are `prefix` and their numbers."""
        units: list[Any] = list(self.blocks)  # Any: a ModuleList has modules of any class
        return [(f"{prefix}.{index}", block) for index, block in enumerate(units)]


def tower_context(context: LayerContext) -> LayerContext:
    """The context of a tower's layers: each rank has all of them."""
    return replace(context, tp=TensorParallelGroup())


def hint_at_tower(missing: Iterable[str], tower: VisionTower | None) -> str:
    """For the end of a message about tensors that a checkpoint lacks: what to do if all of them are the tower's."""
    if tower is None or not all(name.startswith(tower.spec.prefixes) for name in missing):
        return ""
    return ". They are of the part that reads images; language_model_only=True (--language-model-only) leaves it out"
