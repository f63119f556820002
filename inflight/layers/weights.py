"""`WeightSlot` and `Loadable`: layers declare where each tensor of a checkpoint goes, and `model_loader` fills these places.

Loading a layer has three steps, and the loader keeps their order:
1. `weight_slots(prefix)` names every tensor the layer wants, with its full shape, as the checkpoint writes it.
2. Every slot is filled.
3. `finish_loading()` brings the weights into the form that `forward` uses, and drops the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from inflight.kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint, of shape `shape`, of which this rank holds `[start, start + size)` along `dim`.

    `destination` is a view of the layer's (perhaps fused) weight with the shape of the part held; its dtype is the
    engine's. `is_scale` marks norm weights, which dummy weights set to one.

    `accept` is offered the part as the checkpoint stores it (floats may lie in the mapped file). It returns True if the layer
    keeps the part until `finish_loading`. A part that is not accepted is copied to `destination`, dequantized if need be; so is
    every part of a slot without `accept` (an embedding's).
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
    """A layer, or a block of layers. A block loads its children, under the names of its attributes."""

    def weight_slots(self, prefix: str) -> WeightSlots:
        """The tensors of the layer that is called `prefix` in the checkpoint, and where each goes."""
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.weight_slots(f"{prefix}.{name}")

    def finish_loading(self) -> None:
        """Called once, after every slot is filled and before the first `forward`."""
        for child in self.children():
            if isinstance(child, Loadable):
                child.finish_loading()
