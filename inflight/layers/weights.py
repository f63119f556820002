"""`WeightSlot` and `Loadable`: layers declare where each tensor of a checkpoint goes, and `model_loader` fills these places.

Loading a layer has three steps, and the loader keeps their order:
1. `weight_slots(prefix)` lists every tensor that the layer needs, with its name and its full shape in the checkpoint.
2. The loader fills every slot.
3. `finish_loading()` converts the weights to the form that `forward` uses, and drops the weights that were filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from inflight.kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint, of shape `shape`, of which this rank holds `[start, start + size)` along `dim`.

    `destination` is a view of the layer's (perhaps fused) weight. It has the shape of this rank's part and the engine's dtype.
    `is_scale` marks the weights of norms. If a model gets random weights, the weights of norms are set to 1.

    The loader calls `accept` with the part as the checkpoint stores it (floats may be a view of the mapped file). `accept`
    returns True if the layer keeps the part until `finish_loading`. Otherwise the part is dequantized if necessary and copied
    to `destination`. If `accept` is None, as in the slot of an embedding, every part is copied.
    """

    shape: tuple[int, ...]
    destination: Tensor
    dim: int = 0
    start: int = 0
    is_scale: bool = False
    accept: Callable[[Tensor | QuantizedWeight], bool] | None = None

    @property
    def size(self) -> int:
        return self.destination.shape[self.dim]


WeightSlots = Iterator[tuple[str, WeightSlot]]


class Loadable(nn.Module):
    """A layer, or a block of layers. A block loads its children. The name of a child in the checkpoint is the name of the
    block's attribute."""

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Returns the tensors of the layer whose name in the checkpoint is `prefix`, and the destination of each tensor."""
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.weight_slots(f"{prefix}.{name}")

    def finish_loading(self) -> None:
        """Called once, after every slot is filled and before the first `forward`."""
        for child in self.children():
            if isinstance(child, Loadable):
                child.finish_loading()
