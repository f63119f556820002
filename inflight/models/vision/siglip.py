"""`SiglipTower`: SigLIP towers (arXiv:2303.15343), and what brings their patches to the decoder's tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.config.vision import Gemma3VisionSpec, Grid, Idefics3VisionSpec, SiglipSpec
from inflight.layers.context import LayerContext
from inflight.layers.layer_norm import LayerNorm
from inflight.layers.norm import RMSNorm
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.vision.block import BlockNames, VisionBlock, WholeLinear
from inflight.models.vision.tower import EncoderState, VisionTower, tower_context

_NAMES = BlockNames(
    before_attention="layer_norm1",
    attention="self_attn",
    qkv=None,
    output="out_proj",
    before_mlp="layer_norm2",
    up="fc1",
    down="fc2",
)


class SiglipEmbeddings(Loadable):
    """The embeddings of patches and of positions."""

    def __init__(self, spec: SiglipSpec, context: LayerContext) -> None:
        super().__init__()
        size = spec.patch_size
        stored_shape = (spec.hidden_size, spec.num_channels, size, size)
        self.patch_embedding = WholeLinear(
            spec.patch_features, spec.hidden_size, stored_shape=stored_shape, context=context
        )
        table = torch.empty(
            spec.positions_per_side**2, spec.hidden_size, dtype=context.dtype, device=context.weight_device
        )
        self.position_embedding = nn.Parameter(table, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        table = self.position_embedding.data
        yield f"{prefix}.position_embedding.weight", WeightSlot(shape=tuple(table.shape), destination=table)


class SiglipTower(VisionTower):
    """The tower without what follows its last norm. `prefix`: what the names of its tensors begin with."""

    prefix: str
    spec: SiglipSpec

    def __init__(self, spec: SiglipSpec, context: LayerContext) -> None:
        context = tower_context(context)
        super().__init__(spec, context)
        self.embeddings = SiglipEmbeddings(spec, context)
        self.blocks = nn.ModuleList(
            VisionBlock(spec, activation=spec.activation, eps=spec.eps, names=_NAMES, context=context)
            for _ in range(spec.num_layers)
        )
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.eps, context, has_bias=True)

    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        frames, rows, columns = grid
        size = self.spec.patch_size
        channels, height, width = pixels.shape
        assert frames == 1 and (rows, columns) == (height // size, width // size), f"{pixels.shape} for {grid}"
        pixels = pixels[:, : rows * size, : columns * size].to(self.device, self.dtype)
        # [channels, rows, size, columns, size] -> [rows, columns, channels, size, size]
        patches = pixels.reshape(channels, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        residual = self.embeddings.patch_embedding(patches.reshape(rows * columns, -1))
        positions = self.positions(rows, columns).to(self.device)
        residual.add_(F.embedding(positions, self.embeddings.position_embedding))
        return EncoderState(grid=grid, residual=residual, segments=(rows * columns,))

    def positions(self, rows: int, columns: int) -> Tensor:
        """Returns the position of each patch: int64 [rows * columns]. A position is a place in a square of
        `positions_per_side` rows. In a grid of another size, each patch has the position at the same share of the way from the
        first row to the last, and so with columns (arXiv:2307.06304)."""
        side = self.spec.positions_per_side
        borders = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32, device="cpu")

        def along(count: int) -> Tensor:
            step = 1.0 / torch.tensor(count, dtype=torch.int64, device="cpu")
            share = torch.arange(count, dtype=torch.float32, device="cpu") * step
            return torch.bucketize(share.clamp_(max=1.0 - 1e-6), borders, right=True)

        return (along(rows)[:, None] * side + along(columns)).flatten()

    def normed(self, state: EncoderState) -> Tensor:
        """The norm of the last layer's result: [num_patches, hidden_size]."""
        state.share_rows()
        assert state.delta is not None and state.layer == self.spec.num_layers, "layers are left"
        return self.post_layernorm.add_and_norm(state.delta, state.residual)

    def load_units(self) -> list[tuple[str, Loadable]]:
        return [
            (f"{self.prefix}.embeddings", self.embeddings),
            *self.block_units(f"{self.prefix}.encoder.layers"),
            (f"{self.prefix}.post_layernorm", self.post_layernorm),
        ]


class Idefics3Tower(SiglipTower):
    """The tower of Idefics3 and SmolVLM."""

    prefix = "model.vision_model"

    def __init__(self, spec: Idefics3VisionSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        in_features = spec.hidden_size * spec.merge_size**2
        self.projection = WholeLinear(in_features, spec.out_size, bias=False, context=tower_context(context))

    def finish(self, state: EncoderState) -> Tensor:
        _, rows, columns = state.grid
        size = self.spec.merge_size
        # [rows, size, columns, size, hidden_size] -> [rows, columns, size, size, hidden_size]
        squares = self.normed(state).view(rows // size, size, columns // size, size, -1).transpose(1, 2)
        out: Tensor = self.projection(squares.reshape(rows // size * (columns // size), -1))
        return out

    def load_units(self) -> list[tuple[str, Loadable]]:
        return [*super().load_units(), ("model.connector.modality_projection.proj", self.projection)]


class Gemma3Projector(Loadable):
    """Norms the mean of the patches of a token, and projects it to the decoder."""

    def __init__(self, spec: Gemma3VisionSpec, context: LayerContext) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, spec.eps, context, offset=1.0)
        self.projection = WholeLinear(spec.hidden_size, spec.out_size, bias=False, context=context)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from self.norm.weight_slots(f"{prefix}.mm_soft_emb_norm")
        transposed = self.projection.weight.data.T
        slot = WeightSlot(shape=tuple(transposed.shape), destination=transposed)
        yield f"{prefix}.mm_input_projection_weight", slot

    def forward(self, means: Tensor) -> Tensor:
        out: Tensor = self.projection(self.norm(means))
        return out


class Gemma3Tower(SiglipTower):
    """The tower of Gemma 3."""

    prefix = "model.vision_tower"

    def __init__(self, spec: Gemma3VisionSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        self.projector = Gemma3Projector(spec, tower_context(context))

    def positions(self, rows: int, columns: int) -> Tensor:
        assert rows == columns == self.spec.positions_per_side, f"{rows} x {columns} patches"
        return torch.arange(rows * columns, dtype=torch.int64, device="cpu")

    def finish(self, state: EncoderState) -> Tensor:
        _, rows, columns = state.grid
        size = self.spec.merge_size
        squares = self.normed(state).view(rows // size, size, columns // size, size, -1)
        means = squares.mean(dim=(1, 3), dtype=torch.float32).to(self.dtype)
        out: Tensor = self.projector(means.flatten(0, 1))
        return out

    def load_units(self) -> list[tuple[str, Loadable]]:
        return [*super().load_units(), ("model.multi_modal_projector", self.projector)]
