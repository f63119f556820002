"""`ShortConvMixer`: a recurrent layer that is a short convolution between two gates (kernels/short_conv.py)."""

from torch import Tensor

from inflight.config.mixers import ShortConvSpec
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.short_conv import CpuShortConv, short_conv
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mixer import MixerPlace
from inflight.layers.recurrent_mixer import RecurrentMixer, float_weight
from inflight.layers.recurrent_state import RecurrentState
from inflight.layers.sharding import even_shard, fused
from inflight.layers.weights import WeightSlot, WeightSlots


class ShortConvMixer(RecurrentMixer):
    """Each rank has some of the channels."""

    name = "conv"

    def __init__(self, spec: ShortConvSpec, place: MixerPlace) -> None:
        super().__init__()
        context = place.context
        hidden_size = place.architecture.hidden_size
        self.part = even_shard(hidden_size, context.tp)
        parts = fused("in_proj", {"b": self.part, "c": self.part, "x": self.part})
        self.in_proj = ColumnParallelLinear(hidden_size, parts, bias=spec.bias, context=context)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias=spec.bias, context=context)
        shape = spec.kernel_size - 1, self.part.size
        name = f"model.layers.{place.layer}.{self.name}"
        self.state = RecurrentState(name, [shape], [context.dtype], context.backend)
        self.weight = float_weight(context, self.part.size, 1, spec.kernel_size)
        self.bias = float_weight(context, self.part.size) if spec.bias else None
        self.dtype = context.dtype
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield from super().weight_slots(prefix)
        for name, values in (("weight", self.weight), ("bias", self.bias)):
            if values is not None:
                shape = self.part.total, *values.shape[1:]
                yield (f"{prefix}.conv.{name}", WeightSlot(shape=shape, destination=values.data, start=self.part.start))

    def finish_loading(self) -> None:
        super().finish_loading()
        self.taps = self.weight.data[:, 0].T.contiguous()
        self.offset = None if self.bias is None else self.bias.data
        self.kernel = None
        if isinstance(self.ops, CpuLayerOps) and CpuShortConv.supports(self.taps, self.dtype):
            self.kernel = CpuShortConv(self.ops.kernels, self.taps, self.offset)

    def compute_piece(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """See `RecurrentMixer`. The state is the last inputs of the convolution."""
        (inputs,) = state
        return short_conv(rows, inputs, self.taps, self.offset)
