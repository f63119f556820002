"""`fill_from_seed`: fills a model with random weights instead of a checkpoint, for `load_format="dummy"`.

A tensor depends only on the seed, its name and the kind of device. So the weights are the same for any number of ranks and any
order of loading.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from inflight.layers.weights import Loadable, WeightSlot

STANDARD_DEVIATION = 0.02


def fill_from_seed(unit: Loadable, prefix: str, *, seed: int) -> None:
    """Draws weights from N(0, 0.02) and sets norms to 1."""
    for name, slot in unit.weight_slots(prefix):
        if slot.is_scale:
            slot.destination.fill_(1)
        else:
            _draw(slot, f"{seed} {name}")


def _draw(slot: WeightSlot, source: str) -> None:
    """Draws on the device itself, because a GPU needs only a second for an 8B model. So a GPU and a CPU draw different
    values."""
    digest = hashlib.sha256(source.encode()).digest()
    destination: Tensor = slot.destination
    generator = torch.Generator(destination.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    is_whole = tuple(destination.shape) == slot.shape
    whole = destination if is_whole else destination.new_empty(slot.shape)
    whole.normal_(0, STANDARD_DEVIATION, generator=generator)
    if not is_whole:
        destination.copy_(whole.narrow(slot.dim, slot.start, slot.size))
