"""`VisionTower`: the interface of vision towers. `EncoderState`: an image on its way through the layers of a tower."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.config.vision import Grid, VisionSpec
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable
from inflight.models.vision.attention import Heads
from inflight.models.vision.block import TowerBlock
from inflight.models.vision.division import RowDivision

# token ids, positions and types of tokens, [num_tokens] each -> [num_tokens, hidden_size]
Embed = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class RefusedImageError(Exception):
    """The tower cannot compute an image, because of what the image is. The rank and its other images are not affected."""


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
        division: which patches this rank computes; None: all. In `residual` and `delta` only the rows of these are right, until
            `share_rows` is called.
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
    division: RowDivision | None = None

    def share_rows(self) -> None:
        """All ranks get the rows of all patches. Called between two layers."""
        if self.division is not None and self.delta is not None:
            own = self.division.own
            both = self.division.gather(torch.cat((self.residual[own], self.delta[own]), dim=1))
            self.residual, self.delta = (each.contiguous() for each in both.chunk(2, dim=1))

    def add_delta(self) -> None:
        """Adds the output of the last layer to the residual stream, of all patches."""
        self.share_rows()
        if self.delta is not None:
            self.residual.add_(self.delta)
            self.delta = None


class VisionTower(nn.Module, ABC):
    """Makes embeddings of an image for the decoder. Every rank of the first stage has the whole tower. Tensor-parallel ranks
    divide the patches of a large image, so all of them call `advance` and `finish` in the same order.

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
        self.group = TensorParallelGroup()  # the ranks that compute an image together
        self._refused: deque[tuple[bytes, str]] = deque()

    @abstractmethod
    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        """Makes embeddings of the patches and adds their positions.

        pixels: any dtype of floats, as the family's processor returns them: [channels, height, width], or [num_patches,
        patch_features]. `VisionSpec.grid_problem` is None for the grid.
        """

    def advance(self, state: EncoderState, num_slices: int) -> None:
        """Computes the next `num_slices` slices of layers (`VisionSpec.patches_of_slice`), or those that are left.

        Raises:
            RefusedImageError: the tower cannot compute the image. `state` must not be used any more.
        """
        if state.layer == 0 and state.heads is None:
            state.division = RowDivision.make(self.group, len(state.residual), self.spec.patches_of_slice)
        for _ in range(num_slices):
            if state.layer < self.spec.num_layers:
                self._compute_slice(state)

    def _compute_slice(self, state: EncoderState) -> None:
        block = self.blocks[state.layer]
        assert isinstance(block, TowerBlock)
        if state.heads is None:
            state.heads = self._begin_layer(block, state)
            state.delta = torch.empty_like(state.residual)
        assert state.delta is not None
        last = min(state.num_done + self.spec.patches_of_slice, len(state.residual))
        own = (state.num_done, last) if state.division is None else state.division.part(state.num_done, last)
        if own[0] < own[1]:
            segments = self.segments_of(state, state.layer)
            state.delta[slice(*own)] = block(state.heads, state.residual, segments, *own)
        state.num_done = last
        if state.num_done == len(state.residual):
            state.heads, state.num_done = None, 0
            state.layer += 1
            self.after_layer(state)

    def _begin_layer(self, block: TowerBlock, state: EncoderState) -> Heads:
        """Returns the keys and values of all patches, and the queries of this rank's patches at their places."""
        if state.division is None:
            return block.begin(state.delta, state.residual, state.rotation)
        own = state.division.own
        residual = state.residual[own]
        delta = None if state.delta is None else state.delta[own]
        rotation = state.rotation
        if rotation is not None:
            rotation = Rotation(rotation.cos[own], rotation.sin[own], rotation.ops)
        heads = block.begin(delta, residual, rotation)
        state.residual[own] = residual
        query = torch.empty((len(state.residual), *heads.query.shape[1:]), dtype=heads.query.dtype, device=self.device)
        query[own] = heads.query
        key, value = state.division.gather(torch.cat((heads.key, heads.value), dim=1)).chunk(2, dim=1)
        return Heads(query, key, value)

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

    def refuse(self, digest: bytes, reason: str, grid: Grid) -> Tensor:
        """Keep the reason for `take_refused`. Returns zeros in the shape of the embeddings: steps that are planned already may
        use them, for requests that will fail."""
        self._refused.append((digest, reason))
        size = self.spec.out_size * (1 + self.spec.num_deepstack)
        return torch.zeros(self.spec.num_tokens(grid), size, dtype=self.dtype, device=self.device)

    def take_refused(self) -> tuple[tuple[bytes, str], ...]:
        """Returns the digests of the images that were refused since the last call, and why. Any thread may call it."""
        return tuple(self._refused.popleft() for _ in range(len(self._refused)))

    def read_names(self, stored: Mapping[str, tuple[int, ...]] | None) -> None:
        """Called once before `load_units`. `stored`: name -> shape of each tensor of the checkpoint; None for random ones."""

    def leaves_unread(self, name: str) -> bool:
        """See `CausalLM.leaves_unread`."""
        return False

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


def hint_at_tower(missing: Iterable[str], tower: VisionTower | None, files: Mapping[str, Path] | None = None) -> str:
    """For the end of a message about tensors that a checkpoint lacks: what to do if all of them are the tower's. `files`: where
    each tensor is that the checkpoint has; the message names the file of the tower's."""
    if tower is None or not all(name.startswith(tower.spec.prefixes) for name in missing):
        return ""
    of_tower = {file for name, file in (files or {}).items() if name.startswith(tower.spec.prefixes)}
    where = f", whose other tensors are in {of_tower.pop()}" if len(of_tower) == 1 else ""
    return f". They are of the part that reads images{where}; language_model_only=True (--language-model-only) leaves it out"
