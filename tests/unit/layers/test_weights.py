"""Slots and blocks of weights: what a rank reads, and which weights get memory."""

from __future__ import annotations

import torch
from torch import nn

from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


def test_how_much_of_a_tensor_is_read() -> None:
    part = torch.empty(4, 6)
    assert WeightSlot(shape=(8, 6), destination=part).size == 4
    assert WeightSlot(shape=(4, 12), destination=part, dim=1).size == 6
    assert WeightSlot(shape=(), destination=torch.empty(())).size == 1
    assert WeightSlot(shape=(9, 6), destination=part, rows=torch.tensor([7, 0, 2, 1])).size == 8


class Leaf(Loadable):
    def __init__(self, device: str, finished: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16, device=device), False)
        self.finished = finished

    def weight_slots(self, prefix: str) -> WeightSlots:
        yield f"{prefix}.weight", WeightSlot(shape=(2, 3), destination=self.weight.data)

    def finish_loading(self) -> None:
        self.finished.append("leaf")


class Block(Loadable):
    def __init__(self, finished: list[str]) -> None:
        super().__init__()
        self.first, self.second = Leaf("meta", finished), Leaf("cpu", finished)
        self.other = nn.Linear(2, 2)


def test_a_block_is_its_children() -> None:
    finished = list[str]()
    block = Block(finished)
    assert [name for name, _ in block.weight_slots("model.x")] == ["model.x.first.weight", "model.x.second.weight"]
    has_memory = block.second.weight
    block.allocate(torch.device("cpu"))
    assert block.second.weight is has_memory, "for example the weight of a tied head"
    weight = block.first.weight
    assert (weight.device.type, weight.dtype, weight.shape, weight.requires_grad) == (
        "cpu",
        torch.bfloat16,
        (2, 3),
        False,
    )
    block.finish_loading()
    assert finished == ["leaf", "leaf"]
