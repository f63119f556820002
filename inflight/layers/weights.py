"""`WeightSlot`: where one tensor of a checkpoint goes. Layers declare them, `model_loader` fills them.

Loading a layer has three steps, and whoever loads keeps their order:
1. `weight_slots(prefix)` names every tensor the layer wants, with its full shape, as the checkpoint writes it.
2. Every slot is filled.
3. `finish_loading()` brings the weights into the form that `forward` uses, and drops the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inflight.layers.quantized_weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint, of shape `shape`, of which this rank holds `[start, start + size)` along `dim`.

    `destination` is a view of the layer's (perhaps fused) weight with the shape of the part held; its dtype is the
    engine's. `is_scale` marks norm weights, which dummy weights set to one.

    `accept` is offered the part held of a tensor as it is stored (floats may lie in the mapped file), and tells whether the
    layer takes it, to keep until `finish_loading`. What it does not take goes to `destination`, dequantized if need be; so does
    everything without it (an embedding).
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


class Loadable(Protocol):
    """A layer, or a block of layers, that is loaded as one."""

    def weight_slots(self, prefix: str) -> WeightSlots:
        """The checkpoint's names below `prefix` (no trailing dot) and where each goes."""

    def finish_loading(self) -> None:
        """Called once, after every slot is filled and before the first `forward`."""
