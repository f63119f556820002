"""`Collectives`: how one rank exchanges tensors with the other ranks of its group.

After a fault the ranks connect again, and each group gets new collectives.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Collectives(ABC):
    """Every rank must call the collectives in the same order with equal shapes and dtypes, from one thread at a time. All ranks
    get the same result, bit for bit.

    If a peer has left the group, has died or does not call in time, the collectives raise ConnectionError, TimeoutError, or
    RuntimeError from torch. After an error no collective of this object works any more.

    Attributes:
        size: the number of ranks, at least 2.
        rank: the rank of this end, in [0, size).
    """

    size: int
    rank: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks. May reuse `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns the ranks' tensors, concatenated along `dim` in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Returns the `x` of rank 0. The `x` of the other ranks may be overwritten."""

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for other ranks in a collective. False if this is not known. Any thread may call it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Leave the group: the waits of this rank and of its peers fail, now and later. Idempotent. Any thread may call it.
        On GPUs the waits end without an error, and all later results are garbage."""


def sum_in_rank_order(parts: Sequence[Tensor], *, reuse: bool = False) -> Tensor:
    """The sum of the ranks' tensors, given in rank order. Tensors of 16-bit floats are added in float32, and the sum is rounded
    once. The C++ kernels compute the same bits. With `reuse`, the first tensor may be overwritten."""
    first, *others = parts
    dtype = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
    total = first.to(dtype, copy=not reuse)
    for other in others:
        total += other
    return total.to(first.dtype)
