"""`Gemma4Tower`: the tower of Gemma 4, for images of any size. Its layers are those of Gemma's decoders: RMSNorms before and
after attention and MLP, and norms of queries, keys and values."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.attention.backend import Rotation
from inflight.config.vision import Gemma4VisionSpec, Grid
from inflight.kernels.encoder_ops import activate
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.mrope import cos_and_sin
from inflight.layers.norm import RMSNorm
from inflight.layers.qk_norm import QKNorm
from inflight.layers.sharding import OutputShard, repeat_order
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.vision.attention import Heads, attend
from inflight.models.vision.block import TowerBlock, WholeLinear
from inflight.models.vision.tower import EncoderState, VisionTower, tower_context

_PREFIX = "model.vision_tower"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class BoundedLinear(Loadable):
    """A linear layer without bias. With `has_bounds`, its inputs and its outputs are clamped to bounds from the checkpoint.

    `order`: the output features of the checkpoint in the order of this layer; None: the same order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        spec: Gemma4VisionSpec,
        context: LayerContext,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        part = OutputShard(total=out_features, start=0, size=out_features, order=order)
        self.linear = ColumnParallelLinear(in_features, {"linear": part}, bias=False, context=context)
        self.bounds: nn.Parameter | None = None
        if spec.has_bounds:
            self.bounds = nn.Parameter(torch.zeros(len(_BOUNDS), dtype=context.dtype, device=context.device), False)
        self.of_inputs = self.of_outputs = (-math.inf, math.inf)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        if self.bounds is not None:
            for name, bound in zip(_BOUNDS, self.bounds.data, strict=True):
                yield f"{prefix}.{name}", WeightSlot(shape=(), destination=bound, is_scale=True)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.bounds is not None:
            low, high, out_low, out_high = self.bounds.tolist()
            # where weights are random, all bounds are 1, and mean nothing
            self.of_inputs = (low, high) if low < high else self.of_inputs
            self.of_outputs = (out_low, out_high) if out_low < out_high else self.of_outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is not None:
            x = x.clamp(*self.of_inputs)
        out: Tensor = self.linear(x)
        return out if self.bounds is None else out.clamp_(*self.of_outputs)


class Gemma4VisionAttention(Loadable):
    """The names of its parts are those of the checkpoint, except `qk_norm`."""

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.num_heads * spec.head_dim
        # Columns rotate the first half of a head, rows the second. Here the pairs are (i, i + head_dim / 2), as everywhere.
        quarters = torch.arange(spec.head_dim, dtype=torch.int64, device="cpu").view(4, -1)
        order = quarters[[0, 2, 1, 3]].flatten()
        self.q_proj, self.k_proj = (
            BoundedLinear(size, inner, spec, context, repeat_order(order, inner)) for _ in range(2)
        )
        self.v_proj = BoundedLinear(size, inner, spec, context)
        self.o_proj = BoundedLinear(inner, size, spec, context)
        self.qk_norm = QKNorm(spec.num_heads, spec.num_heads, spec.head_dim, spec.eps, context, order=order)
        self.value_norm = torch.ones(spec.num_heads, spec.head_dim, dtype=context.dtype, device=context.device)
        self.num_heads, self.head_dim, self.ops = spec.num_heads, spec.head_dim, context.ops

    def heads(self, hidden: Tensor, rotation: Rotation) -> Heads:
        """[num_patches, hidden_size] -> queries, keys and values."""
        query_key = torch.cat([self.q_proj(hidden), self.k_proj(hidden)], dim=1)
        query_key = rotation.apply(query_key.view(len(hidden), -1, self.head_dim), self.qk_norm)
        value = self.v_proj(hidden).view(len(hidden), -1, self.head_dim)
        self.ops.norm_heads(value, self.value_norm, self.qk_norm.eps)
        return Heads(query_key[:, : self.num_heads], query_key[:, self.num_heads :], value)


class Gemma4VisionMLP(Loadable):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        super().__init__()
        self.gate_proj = BoundedLinear(spec.hidden_size, spec.mlp_size, spec, context)
        self.up_proj = BoundedLinear(spec.hidden_size, spec.mlp_size, spec, context)
        self.down_proj = BoundedLinear(spec.mlp_size, spec.hidden_size, spec, context)
        self.activation, self.ops = spec.activation, context.ops

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.gate_proj(hidden)
        activate(self.ops, inner, self.activation)
        out: Tensor = self.down_proj(inner.mul_(self.up_proj(hidden)))
        return out


class Gemma4VisionBlock(TowerBlock):
    """The names of its parts are those of the checkpoint."""

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.eps
        self.input_layernorm = RMSNorm(size, eps, context)
        self.self_attn = Gemma4VisionAttention(spec, context)
        self.post_attention_layernorm = RMSNorm(size, eps, context)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, context)
        self.mlp = Gemma4VisionMLP(spec, context)
        self.post_feedforward_layernorm = RMSNorm(size, eps, context)

    def begin(self, delta: Tensor | None, residual: Tensor, rotation: Rotation | None) -> Heads:
        assert rotation is not None
        norm = self.input_layernorm
        hidden = norm(residual) if delta is None else norm.add_and_norm(delta, residual)
        return self.self_attn.heads(hidden, rotation)

    def forward(self, heads: Heads, residual: Tensor, segments: Sequence[int], first: int, last: int) -> Tensor:
        attended = attend(self.self_attn.ops, heads, segments, first, last, scale=1.0)
        delta = self.post_attention_layernorm(self.self_attn.o_proj(attended))
        hidden = self.pre_feedforward_layernorm.add_and_norm(delta, residual[first:last])
        out: Tensor = self.post_feedforward_layernorm(self.mlp(hidden))
        return out


class Gemma4Patches(Loadable):
    """The embeddings of patches, and of their columns and rows. The names are those of the checkpoint."""

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        super().__init__()
        self.input_proj = WholeLinear(spec.patch_features, spec.hidden_size, bias=False, context=context)
        shape = (2, spec.num_positions, spec.hidden_size)
        table = torch.empty(shape, dtype=context.dtype, device=context.weight_device)
        self.position_embedding_table = nn.Parameter(table, False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        table = self.position_embedding_table.data
        yield f"{prefix}.position_embedding_table", WeightSlot(shape=tuple(table.shape), destination=table)

    def forward(self, pixels: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """pixels [num_patches, patch_features], from -1 to 1; columns and rows int64 [num_patches]."""
        embedded: Tensor = self.input_proj(pixels)
        of_columns, of_rows = self.position_embedding_table
        return embedded.add_(F.embedding(columns, of_columns) + F.embedding(rows, of_rows))


class Gemma4Standard(Loadable):
    """Subtracts a bias and multiplies by a scale, for each element of a token."""

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        super().__init__()
        zeros = torch.zeros(spec.hidden_size, dtype=context.dtype, device=context.device)
        self.bias = nn.Parameter(zeros, False)
        self.scale = nn.Parameter(torch.ones_like(zeros), False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        for name, weight in (("std_bias", self.bias.data), ("std_scale", self.scale.data)):
            yield f"{prefix}.{name}", WeightSlot(shape=tuple(weight.shape), destination=weight, is_scale=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """float32 [num_tokens, hidden_size]; changes it."""
        return tokens.sub_(self.bias.float()).mul_(self.scale.float())


class Gemma4Tower(VisionTower):
    """A token is the mean of `merge_size` x `merge_size` patches."""

    spec: Gemma4VisionSpec

    def __init__(self, spec: Gemma4VisionSpec, context: LayerContext) -> None:
        context = tower_context(context)
        super().__init__(spec, context)
        self.patches = Gemma4Patches(spec, context)
        self.blocks = nn.ModuleList(Gemma4VisionBlock(spec, context) for _ in range(spec.num_layers))
        self.standard = Gemma4Standard(spec, context) if spec.is_standardized else None
        self.projection = WholeLinear(spec.hidden_size, spec.out_size, bias=False, context=context)
        self.token_norm = torch.ones(spec.hidden_size, dtype=context.dtype, device=context.device)
        # of each element of a head, in the order of its weights here: the frequency, and whether it is multiplied by the column
        # (0) or by the row (1)
        quarter = spec.head_dim // 4
        exponents = torch.arange(quarter, dtype=torch.float32, device="cpu") / quarter
        self.frequencies = (1.0 / spec.rope_theta**exponents).repeat(4).to(context.device)
        self.coordinates = torch.arange(2, dtype=torch.int64, device="cpu").repeat_interleave(quarter).repeat(2)

    def begin(self, pixels: Tensor, grid: Grid) -> EncoderState:
        frames, rows, columns = grid
        assert frames == 1 and pixels.shape == (rows * columns, self.spec.patch_features), f"{pixels.shape} for {grid}"
        places = torch.arange(rows * columns, dtype=torch.int64, device="cpu")
        coordinates = torch.stack([places % columns, places // columns], dim=1)  # [num_patches, 2]
        pixels = pixels.to(self.device, torch.float32).sub(0.5).mul_(2.0).to(self.dtype)  # were from 0 to 1
        residual = self.patches(pixels, *coordinates.to(self.device).T)
        positions = coordinates[:, self.coordinates].to(self.device)  # [num_patches, head_dim]
        cos, sin = cos_and_sin(positions, self.frequencies, 1.0, self.dtype)
        rotation = Rotation(cos, sin, self.ops)
        return EncoderState(grid=grid, residual=residual, segments=(rows * columns,), rotation=rotation)

    def finish(self, state: EncoderState) -> Tensor:
        assert state.layer == self.spec.num_layers, "layers are left"
        state.add_delta()
        _, rows, columns = state.grid
        size = self.spec.merge_size
        squares = state.residual.view(rows // size, size, columns // size, size, -1)
        means = squares.mean(dim=(1, 3), dtype=torch.float32).flatten(0, 1).to(self.dtype)
        tokens = means.float() * self.spec.hidden_size**0.5
        if self.standard is not None:
            tokens = self.standard(tokens)
        out: Tensor = self.projection(self.ops.rms_norm(tokens.to(self.dtype), self.token_norm, self.spec.eps))
        return out

    def load_units(self) -> list[tuple[str, Loadable]]:
        standard = [] if self.standard is None else [(_PREFIX, self.standard)]
        return [
            (f"{_PREFIX}.patch_embedder", self.patches),
            *self.block_units(f"{_PREFIX}.encoder.layers"),
            *standard,
            ("model.embed_vision.embedding_projection", self.projection),
        ]
