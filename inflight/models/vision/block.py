"""`VisionBlock`: a layer of a vision tower. Patches of one segment (a frame, or a window of it) see each other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inflight.attention.backend import Rotation
from inflight.config.architecture import GatedMlpSpec
from inflight.config.vision import VisionSpec
from inflight.kernels.encoder_ops import activate
from inflight.layers.context import LayerContext
from inflight.layers.gated_mlp import GatedMLP
from inflight.layers.layer_norm import LayerNorm
from inflight.layers.linear import ColumnParallelLinear, Linear
from inflight.layers.norm import RMSNorm
from inflight.layers.sharding import even_shard, fused
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.vision.attention import Heads, attend


@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """The names of a layer's parts in the checkpoint. `qkv`: of the projection to queries, keys and values, if it is one
    tensor; None: there are three, q_proj, k_proj and v_proj. `up` and `down`: of an MLP without a gate."""

    before_attention: str
    attention: str
    qkv: str | None
    output: str
    before_mlp: str
    up: str = ""
    down: str = ""


class WholeLinear(Linear):
    """A linear layer that each rank has as a whole. `stored_shape`: the shape of its weight in the checkpoint, if it is not
    [out_features, in_features]: that of a convolution whose squares do not overlap."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        context: LayerContext,
        bias: bool = True,
        stored_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, context=context)
        self.stored_shape = stored_shape

    def weight_slots(self, prefix: str) -> WeightSlots:
        weight = self.weight.data
        if self.stored_shape is None:
            yield (
                f"{prefix}.weight",
                WeightSlot(shape=tuple(weight.shape), destination=weight, accept=self.stored.accept),
            )
        else:
            yield (f"{prefix}.weight", WeightSlot(shape=self.stored_shape, destination=weight.view(self.stored_shape)))
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot(shape=tuple(self.bias.shape), destination=self.bias.data)


class PlainVisionMLP(Loadable):
    """Computes down(activation(up(x)))."""

    def __init__(self, spec: VisionSpec, activation: str, names: tuple[str, str], context: LayerContext) -> None:
        super().__init__()
        self.up = WholeLinear(spec.hidden_size, spec.mlp_size, context=context)
        self.down = WholeLinear(spec.mlp_size, spec.hidden_size, context=context)
        self.names = names
        self.activation = activation
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        for name, layer in zip(self.names, (self.up, self.down), strict=True):
            yield from layer.weight_slots(f"{prefix}.{name}")

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden)
        activate(self.ops, inner, self.activation)
        out: Tensor = self.down(inner)
        return out


class TowerBlock(Loadable, ABC):
    """A layer: attention, and then what follows it, which can be computed for some of the patches at a time."""

    @abstractmethod
    def begin(self, delta: Tensor | None, residual: Tensor, rotation: Rotation | None) -> Heads:
        """`delta` is the output of the layer before, not yet added to `residual`, which is changed in place. Both are
        [num_patches, hidden_size]. Returns queries, keys and values."""

    @abstractmethod
    def forward(self, heads: Heads, residual: Tensor, segments: Sequence[int], first: int, last: int) -> Tensor:
        """Returns this layer's delta of the patches [first, last), and changes their rows of `residual`. `segments`: see
        `attend`."""


class VisionBlock(TowerBlock):
    """Attention and MLP. Before each of them there is a norm: a LayerNorm, or with a gated MLP an RMSNorm."""

    def __init__(
        self, spec: VisionSpec, *, activation: str, eps: float, names: BlockNames, context: LayerContext
    ) -> None:
        super().__init__()
        size = spec.hidden_size
        self.names = names
        self.num_heads = spec.num_heads
        self.head_dim = size // spec.num_heads
        self.ops = context.ops
        parts = {name: even_shard(size, context.tp) for name in ("q_proj", "k_proj", "v_proj")}
        if names.qkv is not None:
            parts = fused(names.qkv, parts)
        self.qkv = ColumnParallelLinear(size, parts, bias=True, context=context)
        self.output = WholeLinear(size, size, context=context)
        self.before_attention = self._make_norm(spec, eps, context)
        self.before_mlp = self._make_norm(spec, eps, context)
        self.mlp: Loadable
        if spec.has_gated_mlp:
            self.mlp = GatedMLP(size, GatedMlpSpec(size=spec.mlp_size, bias=True, activation=activation), context)
        else:
            self.mlp = PlainVisionMLP(spec, activation, (names.up, names.down), context)

    @staticmethod
    def _make_norm(spec: VisionSpec, eps: float, context: LayerContext) -> RMSNorm:
        if spec.has_gated_mlp:
            return RMSNorm(spec.hidden_size, eps, context)
        return LayerNorm(spec.hidden_size, eps, context, has_bias=True)

    def weight_slots(self, prefix: str) -> WeightSlots:
        names = self.names
        yield from self.before_attention.weight_slots(f"{prefix}.{names.before_attention}")
        yield from self.qkv.weight_slots(f"{prefix}.{names.attention}.qkv")
        yield from self.output.weight_slots(f"{prefix}.{names.attention}.{names.output}")
        yield from self.before_mlp.weight_slots(f"{prefix}.{names.before_mlp}")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")

    def begin(self, delta: Tensor | None, residual: Tensor, rotation: Rotation | None) -> Heads:
        norm = self.before_attention
        hidden = norm(residual) if delta is None else norm.add_and_norm(delta, residual)
        heads = self.qkv(hidden).view(len(hidden), 3 * self.num_heads, self.head_dim)
        query_key = heads[:, : 2 * self.num_heads]
        value = heads[:, 2 * self.num_heads :]
        if rotation is not None:
            query_key = rotation.apply(query_key, None)
        return Heads(query_key[:, : self.num_heads], query_key[:, self.num_heads :], value)

    def forward(self, heads: Heads, residual: Tensor, segments: Sequence[int], first: int, last: int) -> Tensor:
        attended = attend(self.ops, heads, segments, first, last)
        out: Tensor = self.mlp(self.before_mlp.add_and_norm(self.output(attended), residual[first:last]))
        return out
