"""`BalancedExperts`: which ranks have which experts of a layer, if several ranks may have the same one (expert_exchange.cpp).

Each expert is on one rank for good. A rank also has *places*, in which it can keep copies of experts of other ranks. What is in
the places of all ranks is an array, `copies`, with an element for each place, first those of rank 0: the index of an expert, or
EMPTY.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.functions import LinearWeight
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.recording import KernelLibrary

EMPTY = -1
Indices = npt.NDArray[np.int64]
_HAS_BIAS = 1


class ExpertBalance(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("holders", c_void_p),
        ("pairs", c_void_p),
        ("num_blocks", c_int64),
        ("busiest_blocks", c_int64),
        ("is_ready_for", c_int64),
        ("is_agreed", c_int64),
    )


class Homes(NamedTuple):
    """Where the experts of a layer are for good, and whose the places are.

    Attributes:
        of_expert: [num_experts], the rank of each expert.
        of_place: [places of all ranks], the rank of each place, in ascending order.
    """

    num_ranks: int
    rank: int
    of_expert: Indices
    of_place: Indices


class ExpertPlace:
    """Memory for the weights of one expert.

    Args:
        likes: the products with gate and up, and with down, of other experts of the layer. There is room for the largest.
    """

    def __init__(self, kernels: KernelLibrary, memory: HugePages, likes: Sequence[tuple[PackedLinear, PackedLinear]]):
        gate_up, down = ([pair[index] for pair in likes] for index in range(2))
        self.parts = _PlaceOfProduct(kernels, memory, gate_up), _PlaceOfProduct(kernels, memory, down)


class _PlaceOfProduct:
    """Memory for the weight of one product. `weight` describes the one that is in it."""

    def __init__(self, kernels: KernelLibrary, memory: HugePages, likes: Sequence[PackedLinear]) -> None:
        self._kernels = kernels
        self._packed = memory.allocate(max(each.packed.nbytes for each in likes))
        self._bias = memory.allocate(max(0 if each.bias is None else each.bias.nbytes for each in likes))
        self._packed.zero_()  # takes the memory now, before the KV cache gets what is left
        self.weight = _described(likes[0])

    def begin(self, description: Tensor) -> tuple[list[Tensor], bool]:
        """A weight comes. Returns where its bytes go, one part after the other, and whether it fits. One that does not fit goes
        to memory of its own, and is lost.

        Args:
            description: what `describe` has returned.
        """
        self.weight = LinearWeight.from_buffer_copy(description.numpy().tobytes())
        num_bytes, num_lanes = c_int64(), c_int64()
        self._kernels.inflight_packed_size(self.weight, num_bytes, num_lanes)
        sizes = [num_bytes.value] + [4 * num_lanes.value] * bool(self.weight.bias)
        memory = [self._packed, self._bias][: len(sizes)]
        fits = all(size <= len(each) for size, each in zip(sizes, memory, strict=True))
        self.weight.packed = self._packed.data_ptr()
        self.weight.bias = self._bias.data_ptr() if self.weight.bias else None
        if not fits:
            memory = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        return [each[:size] for each, size in zip(memory, sizes, strict=True)], fits


def describe(product: PackedLinear) -> tuple[Tensor, list[Tensor]]:
    """What another rank must know of a packed weight, and its bytes, one part after the other. All are uint8."""
    description = torch.frombuffer(bytearray(_described(product)), dtype=torch.uint8)
    bias = [] if product.bias is None else [product.bias.view(torch.uint8)]
    return description, [product.packed, *bias]


def empty_description() -> Tensor:
    """Memory for a description."""
    return torch.empty(ctypes.sizeof(LinearWeight), dtype=torch.uint8, device="cpu")


def _described(product: PackedLinear) -> LinearWeight:
    """The weight without its pointers."""
    weight = LinearWeight.from_buffer_copy(product.weight)
    weight.packed = None
    weight.bias = None if product.bias is None else _HAS_BIAS
    return weight


class BalancedExperts:
    """The experts of a layer on this rank, with its places. All methods are called while no step is computed, in the same order
    on all ranks; only `agree_on` may be called in another order.

    Attributes:
        pairs: [num_experts], how many pairs (row, expert) all ranks have computed of each expert so far.
        places: index of a place of this rank -> the place.
    """

    def __init__(self, experts: CpuExperts, homes: Homes) -> None:
        self.homes = homes
        self._experts = experts
        num_experts = len(homes.of_expert)
        self.pairs: Indices = np.zeros(num_experts, dtype=np.int64)
        self._holders = np.zeros((2, num_experts, homes.num_ranks), dtype=np.uint8)
        self._balance = ExpertBalance(self._holders.ctypes.data, self.pairs.ctypes.data)
        experts.layer.balance = ctypes.addressof(self._balance)
        own = np.flatnonzero(homes.of_place == homes.rank).tolist()
        likes = [pair for index in range(num_experts) if (pair := experts.product_of(index)) is not None]
        memory = HugePages()
        self.places = {place: ExpertPlace(experts.kernels, memory, likes) for place in own}
        self._held: set[int] = set()  # the experts whose copies this rank computes
        self.use(np.full(len(homes.of_place), EMPTY))

    @property
    def work(self) -> tuple[int, int]:
        """Blocks of pairs that all ranks have computed, and those of the busiest rank, added up over the steps."""
        return self._balance.num_blocks, self._balance.busiest_blocks

    @property
    def is_agreed(self) -> bool:
        """Whether the last step has used the copies that were given to `agree_on`. The same on all ranks."""
        return bool(self._balance.is_agreed)

    def products_of(self, expert: int) -> tuple[PackedLinear, PackedLinear]:
        """Those of an expert that this rank has for good."""
        found = self._experts.product_of(expert)
        assert found is not None, f"expert {expert} is on another rank"
        return found

    def use(self, copies: Indices) -> None:
        """Use these copies from now on, on all ranks."""
        self._write(0, copies)
        self._balance.is_ready_for = 0
        self._balance.is_agreed = 0
        for expert in self._held:
            self._experts.let_go(expert)
        self._held.clear()
        self._hold(copies)

    def agree_on(self, copies: Indices, name: int) -> None:
        """Use these copies, which contain all that are used now, as soon as all ranks have called this with the same `name`,
        which is not 0."""
        self._write(1, copies)
        self._hold(copies)
        self._balance.is_ready_for = name

    def _write(self, table: int, copies: Indices) -> None:
        holders = self._holders[table]
        holders.fill(0)
        holders[np.arange(len(holders)), self.homes.of_expert] = 1
        filled = copies != EMPTY
        holders[copies[filled], self.homes.of_place[filled]] = 1

    def _hold(self, copies: Indices) -> None:
        for index, place in self.places.items():
            expert = int(copies[index])
            if expert != EMPTY and expert not in self._held:
                self._experts.hold(expert, *(part.weight for part in place.parts))
                self._held.add(expert)
