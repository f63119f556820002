"""The towers of Qwen3-VL (arXiv:2511.21631), Qwen3.5 and Qwen2.5-VL (arXiv:2502.13923).

The patches of a frame are in the order of the tokens: the `merge_size` x `merge_size` patches that become one token are
neighbours. Queries and keys are rotated: by the row of the patch in half of a head's frequencies, by its column in the others.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.config.architecture import GELU
from inflight.config.vision import Grid, Qwen3VisionSpec, Qwen25VisionSpec, QwenVisionSpec
from inflight.kernels.encoder_ops import activate
from inflight.layers.context import LayerContext
from inflight.layers.layer_norm import LayerNorm
from inflight.layers.mrope import cos_and_sin
from inflight.layers.norm import RMSNorm
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.vision.block import BlockNames, VisionBlock, WholeLinear
from inflight.models.vision.tower import EncoderState, VisionTower, tower_context

_PREFIX = "model.visual"
_NAMES = BlockNames(
    before_attention="norm1",
    attention="attn",
    qkv="qkv",
    output="proj",
    before_mlp="norm2",
    up="linear_fc1",
    down="linear_fc2",
)
_EPS = 1e-6  # transformers' models do not read it from config.json


class PatchMerger(Loadable):
    """Joins the patches of a token, and projects them to the decoder: up(gelu(down(x))). `names`: those of the norm and of the
    two projections in the checkpoint. With `norms_joined`, the norm covers the joined patches, else each of them."""

    def __init__(
        self, spec: QwenVisionSpec, names: tuple[str, str, str], context: LayerContext, *, norms_joined: bool = False
    ) -> None:
        super().__init__()
        self.size = spec.hidden_size * spec.merge_size**2
        normed = self.size if norms_joined else spec.hidden_size
        self.norm: RMSNorm
        if spec.has_gated_mlp:
            self.norm = RMSNorm(normed, _EPS, context)
        else:
            self.norm = LayerNorm(normed, _EPS, context, has_bias=True)
        self.inner = WholeLinear(self.size, self.size, context=context)
        self.out = WholeLinear(self.size, spec.out_size, context=context)
        self.names = names
        self.norms_joined = norms_joined
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        for name, layer in zip(self.names, (self.norm, self.inner, self.out), strict=True):
            yield from layer.weight_slots(f"{prefix}.{name}")

    def forward(self, patches: Tensor) -> Tensor:
        """[num_patches, hidden_size] -> [num_tokens, out_size]."""
        joined = self.norm(patches.view(-1, self.size) if self.norms_joined else patches).view(-1, self.size)
        inner = self.inner(joined)
        activate(self.ops, inner, GELU)
        out: Tensor = self.out(inner)
        return out


class PositionTable(Loadable):
    """Learned positions: those of a square of patches, with `side` rows."""

    def __init__(self, side: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.side = side
        table = torch.empty(side**2, hidden_size, dtype=context.dtype, device=context.weight_device)
        self.table = nn.Parameter(table, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield f"{prefix}.weight", WeightSlot(shape=tuple(self.table.shape), destination=self.table.data)

    def at(self, grid: Grid, rows: Tensor, columns: Tensor) -> Tensor:
        """The positions of patches in a frame of any size: float32 [num_patches, hidden_size]. The square is stretched over the
        frame, corner on corner, and a patch gets the mean of the four nearest positions, each weighted by its nearness."""
        total = torch.zeros(1, dtype=torch.float32, device=self.table.device)
        for row, row_weight in self._nearest(rows, grid[1]):
            for column, column_weight in self._nearest(columns, grid[2]):
                weight = (row_weight * column_weight).to(self.table.device)
                index = (row * self.side + column).to(self.table.device)
                total = total + F.embedding(index, self.table) * weight[:, None]
        return total

    def _nearest(self, index: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The two nearest rows (or columns) of the square, and their weights."""
        place = index.to(torch.float32) * (self.side - 1) / max(size - 1, 1)
        below = place.floor()
        share = place - below
        first = below.to(torch.int64)
        return [(first, 1 - share), ((first + 1).clamp_(max=self.side - 1), share)]


class QwenTower(VisionTower):
    """What the towers have in common."""

    spec: QwenVisionSpec
    merger: PatchMerger

    def __init__(self, spec: QwenVisionSpec, context: LayerContext, *, patch_bias: bool) -> None:
        super().__init__(spec, context)
        size = spec.patch_size
        self.patch_embed = WholeLinear(
            spec.patch_features,
            spec.hidden_size,
            bias=patch_bias,
            stored_shape=(spec.hidden_size, spec.num_channels, spec.num_frames, size, size),
            context=context,
        )
        self.blocks = nn.ModuleList(
            VisionBlock(spec, activation=spec.activation, eps=_EPS, names=_NAMES, context=context)
            for _ in range(spec.num_layers)
        )
        # of each element of a head: the frequency, and whether it is multiplied by the row (0) or by the column (1)
        half = spec.hidden_size // spec.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
        self.frequencies = (1.0 / spec.rope_theta**exponents).repeat(4).to(context.device)
        self.coordinates = torch.arange(2, dtype=torch.int64, device="cpu").repeat_interleave(half // 2).repeat(2)

    def embed(self, pixels: Tensor, grid: Grid) -> Tensor:
        """[num_patches, patch_features] -> [num_patches, hidden_size]"""
        frames, rows, columns = grid
        assert pixels.shape == (frames * rows * columns, self.spec.patch_features), f"{pixels.shape} for {grid}"
        embedded: Tensor = self.patch_embed(pixels.to(self.device, self.dtype))
        return embedded

    def places(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The row and the column of each patch: int64 [num_patches] each."""
        frames, rows, columns = grid
        size = self.spec.merge_size

        def in_order(places: Tensor) -> Tensor:
            squares = places.reshape(rows // size, size, columns // size, size).transpose(1, 2)
            return squares.flatten().repeat(frames)

        down = torch.arange(rows, dtype=torch.int64, device="cpu")[:, None].expand(rows, columns)
        across = torch.arange(columns, dtype=torch.int64, device="cpu").expand(rows, columns)
        return in_order(down), in_order(across)

    def rotation(self, rows: Tensor, columns: Tensor) -> Rotation:
        positions = torch.stack((rows, columns), dim=1)[:, self.coordinates]  # [num_patches, head_dim]
        cos, sin = cos_and_sin(positions.to(self.device), self.frequencies, 1.0, self.dtype)
        return Rotation(cos, sin, self.ops)

    def load_units(self) -> list[tuple[str, Loadable]]:
        return [
            (f"{_PREFIX}.patch_embed.proj", self.patch_embed),
            *self.block_units(f"{_PREFIX}.blocks"),
            (f"{_PREFIX}.merger", self.merger),
        ]


class Qwen3Tower(QwenTower):
    """The tower of Qwen3-VL, and without features for the first decoder layers that of Qwen3.5."""

    spec: Qwen3VisionSpec

    def __init__(self, spec: Qwen3VisionSpec, context: LayerContext) -> None:
        context = tower_context(context)
        super().__init__(spec, context, patch_bias=True)
        self.positions = PositionTable(spec.positions_per_side, spec.hidden_size, context)
        names = ("norm", "linear_fc1", "linear_fc2")
        self.merger = PatchMerger(spec, names, context)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(spec, names, context, norms_joined=True) for _ in spec.deepstack_layers
        )

    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        residual = self.embed(pixels, grid)
        rows, columns = self.places(grid)
        residual.add_(self.positions.at(grid, rows, columns).to(self.dtype))
        segments = (grid[1] * grid[2],) * grid[0]
        return EncoderState(grid=grid, residual=residual, segments=segments, rotation=self.rotation(rows, columns))

    def after_layer(self, state: EncoderState) -> None:
        layers = self.spec.deepstack_layers
        if state.layer - 1 in layers:
            state.add_delta()
            merge = self.deepstack_mergers[layers.index(state.layer - 1)]
            state.features.append(merge(state.residual))

    def finish(self, state: EncoderState) -> Tensor:
        assert state.layer == self.spec.num_layers, "layers are left"
        state.add_delta()
        return torch.cat([self.merger(state.residual), *state.features], dim=1)

    def load_units(self) -> list[tuple[str, Loadable]]:
        mergers = [
            (f"{_PREFIX}.deepstack_merger_list.{index}", merger)
            for index, merger in enumerate(self.deepstack_mergers)
            if isinstance(merger, PatchMerger)
        ]
        return [*super().load_units(), (f"{_PREFIX}.pos_embed", self.positions), *mergers]


class Qwen25Tower(QwenTower):
    """The tower of Qwen2.5-VL. In most layers a patch sees its window only, and the patches of a window are neighbours."""

    spec: Qwen25VisionSpec

    def __init__(self, spec: Qwen25VisionSpec, context: LayerContext) -> None:
        context = tower_context(context)
        super().__init__(spec, context, patch_bias=False)
        self.merger = PatchMerger(spec, ("ln_q", "mlp.0", "mlp.2"), context)

    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        order, segments = self.windows(grid)
        num_patches = self.spec.merge_size**2  # of a token
        patches = (order[:, None] * num_patches + torch.arange(num_patches, dtype=torch.int64, device="cpu")).flatten()
        rows, columns = (each[patches] for each in self.places(grid))
        return EncoderState(
            grid=grid,
            residual=self.embed(pixels, grid)[patches.to(self.device)],
            segments=segments,
            rotation=self.rotation(rows, columns),
            order=order,
        )

    def windows(self, grid: Grid) -> tuple[Tensor, Sequence[int]]:
        """The tokens in the order of windows, int64 [num_tokens], and the numbers of patches of the windows. In each frame the
        larger windows come first, so that there are few groups of equal ones."""
        size = self.spec.merge_size
        frames = grid[0]
        rows = grid[1] // size
        columns = grid[2] // size
        down = torch.arange(rows, dtype=torch.int64, device="cpu") // self.spec.window
        across = torch.arange(columns, dtype=torch.int64, device="cpu") // self.spec.window
        window = (down[:, None] * (int(across[-1]) + 1) + across).flatten()  # of each token of a frame
        counts = torch.bincount(window)
        by_size = torch.argsort(counts, descending=True, stable=True)
        place = torch.empty_like(by_size)
        place[by_size] = torch.arange(len(by_size), dtype=torch.int64, device="cpu")
        order = torch.argsort(place[window], stable=True)
        starts = torch.arange(frames, dtype=torch.int64, device="cpu") * rows * columns
        sizes = (counts[by_size] * size**2).tolist()
        return (starts[:, None] + order).flatten(), tuple(sizes * frames)

    def segments_of(self, state: EncoderState, layer: int) -> Sequence[int]:
        if layer in self.spec.full_layers:
            return (state.grid[1] * state.grid[2],) * state.grid[0]
        return state.segments

    def finish(self, state: EncoderState) -> Tensor:
        assert state.layer == self.spec.num_layers and state.order is not None, "layers are left"
        state.add_delta()
        merged = self.merger(state.residual)
        out = torch.empty_like(merged)
        out[state.order.to(self.device)] = merged
        return out
