"""`TensorParallelGroup`: the ranks that share each layer. The base class is a group of one rank, without communication."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorParallelGroup:
    """Layers get the group as an argument, and split their weights by `size` and `rank`.

    A group of several ranks overrides the collectives. Every rank must call the collectives in the same order with equal
    shapes, from one thread at a time. All ranks get the same result, bit for bit. If a peer has left the group, cannot be
    reached or does not call in time, the collectives raise ConnectionError, TimeoutError, or RuntimeError from torch.
    """

    size: int = 1
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks. May reuse `x`."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns the ranks' tensors, concatenated along `dim` in rank order."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns the `x` of rank 0. The `x` of the other ranks may be overwritten."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x
