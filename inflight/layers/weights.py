"""`WeightSlot` and `Loadable`: layers declare where each tensor of a checkpoint goes, and `model_loader` fills these places.

Loading a layer has four steps, and the loader keeps their order:
1. `allocate` gives memory to the weights.
2. `weight_slots(prefix)` lists every tensor that the layer needs, with its name and its full shape in the checkpoint.
3. The loader fills every slot.
4. `finish_loading()` converts the weights to the form that `forward` uses, and drops the weights that were filled in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.weight_rows import WeightRows


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint, of shape `shape`, of which this rank reads `[start, start + size)` along `dim`.

    `destination` is a view of the layer's (perhaps fused) weight. It has the shape of this rank's part and the engine's dtype.
    `is_scale` marks the weights of norms. If a model gets random weights, the weights of norms are set to 1.

    The loader calls `accept` with the part as the checkpoint stores it (floats may be a view of the mapped file), or with rows
    to read later if the part is very large. `accept`
    returns True if the layer keeps the part until `finish_loading`. Otherwise the part is dequantized if necessary and copied
    to `destination`. If `accept` is None, as in the slot of an embedding, every part is copied.

    Before that, the loader changes the part: row i of the result is row `rows[i]` of the part, plus `offset`. Other rows of the
    part are not used. A slot with an
    offset has no `accept`. Random weights are not changed.
    """

    shape: tuple[int, ...]
    destination: Tensor
    dim: int = 0
    start: int = 0
    is_scale: bool = False
    accept: Callable[[Tensor | QuantizedWeight | WeightRows], bool] | None = None
    rows: Tensor | None = None
    offset: float = 0.0

    @property
    def size(self) -> int:
        if self.rows is not None:
            return int(self.rows.max()) + 1
        return self.destination.shape[self.dim] if self.shape else 1


WeightSlots = Iterator[tuple[str, WeightSlot]]


class Loadable(nn.Module):
    """A layer, or a block of layers. A block loads its children. The name of a child in the checkpoint is the name of the
    block's attribute."""

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Returns the tensors of the layer whose name in the checkpoint is `prefix`, and the destination of each tensor."""
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.weight_slots(f"{prefix}.{name}")

    def separate_units(self, prefix: str) -> Iterator[tuple[str, "Loadable"]]:
        """Returns parts of the layer that are so large that the loader fills them alone, one after the other, and then the rest
        of the layer. `weight_slots` and `finish_loading` leave them out."""
        for name, child in self.named_children():
            if isinstance(child, Loadable):
                yield from child.separate_units(f"{prefix}.{name}")

    def allocate(self, device: torch.device) -> None:
        """Allocates memory for the weights that have none. The weights of a tied head have memory already: they are the
        embedding's weights."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.is_meta:
                    assert weight.is_contiguous(), name
                    # `empty_like` would import sympy: 1 s
                    memory = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                    setattr(module, name, nn.Parameter(memory, False))

    def finish_loading(self) -> None:
        """Called once, after every slot is filled and before the first `forward`."""
        for child in self.children():
            if isinstance(child, Loadable):
                child.finish_loading()
