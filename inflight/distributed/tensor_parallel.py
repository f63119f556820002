"""`TensorParallelGroup`: the ranks that share each layer. This one is a rank alone; collectives of one are the identity."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorParallelGroup:
    """Layers take it explicitly and shard by `size` and `rank` only.

    A group of several ranks overrides the collectives. Every rank calls them in the same order with equal shapes, from one
    thread at a time; all ranks get the same bits. When a peer has left, is cut off or stays away for too long, they raise
    (ConnectionError, TimeoutError, or RuntimeError from torch).
    """

    size: int = 1
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks. May reuse `x`."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors, concatenated along `dim` in rank order."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`; the others' are overwritten, or not looked at."""
        assert self.size == 1, "several ranks need a group that can communicate"
        return x
