"""`TensorParallelGroup`: the ranks that share each layer."""

from torch import Tensor

from inflight.distributed.collectives import Collectives


class TensorParallelGroup:
    """Layers get the group as an argument, keep it, and split their weights by `size` and `rank`.

    The group lives as long as the model. Its collectives live for one epoch: when the ranks meet again after a fault, `connect`
    replaces them, and the layers need not know. A CUDA graph or a tape keeps the collectives with which it was recorded, so it
    must be recorded again.

    A group of one rank needs no collectives, and returns each tensor as it is.
    """

    def __init__(self, size: int = 1, rank: int = 0, collectives: Collectives | None = None) -> None:
        self.size, self.rank = size, rank
        self.collectives = collectives

    def connect(self, collectives: Collectives) -> None:
        """Use `collectives` from now on. Call this while no thread uses the group."""
        assert (collectives.size, collectives.rank) == (self.size, self.rank), "a rank keeps its place in the group"
        self.collectives = collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks. May reuse `x`. `Collectives` lists the errors."""
        return x if self.size == 1 else self._connected().all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns the ranks' tensors, concatenated along `dim` in rank order."""
        return x if self.size == 1 else self._connected().all_gather(x, dim)

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns the `x` of rank 0. The `x` of the other ranks may be overwritten."""
        return x if self.size == 1 else self._connected().broadcast(x)

    def _connected(self) -> Collectives:
        assert self.collectives is not None, "several ranks need a group that can communicate"
        return self.collectives
