"""`ChannelCollectives`: collectives of tensors on CPUs, over TCP. Used between machines, and where there are no C++ kernels."""

import torch
from torch import Tensor

from inflight.distributed.collectives import Collectives, sum_in_rank_order
from inflight.distributed.exchange import Exchange
from inflight.distributed.socket_channel import bytes_of

SPLIT_ELEMENTS = 1 << 14  # a smaller tensor is summed in one exchange instead of two


class ChannelCollectives(Collectives):
    """Every rank sends its tensor to all others. A sum is computed in rank order, in float32, and rounded once.

    In a group of more than two ranks, rank i computes the i-th part of a large sum and sends it to the others. So each rank
    sends less than twice the bytes of its tensor, whatever the size of the group.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.size, self.rank = exchange.size, exchange.rank
        self._exchange = exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.size == 2 or x.numel() < SPLIT_ELEMENTS:
            return sum_in_rank_order(self._gather(x), reuse=True)
        parts = list(x.view(-1).tensor_split(self.size))
        own = parts[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        self._swap(parts, received)
        own.copy_(sum_in_rank_order(received))
        self._swap([own] * self.size, parts)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gather(x.contiguous()), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        peers = range(1, self.size)
        if self.rank == 0:
            self._exchange.swap(dict.fromkeys(peers, bytes_of(x)), {})
        else:
            self._exchange.swap({}, {0: bytes_of(x)})
        return x

    @property
    def is_waiting(self) -> bool:
        return self._exchange.is_waiting

    def close(self) -> None:
        self._exchange.close()

    def _gather(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks. That of this rank is `x` itself, which must be contiguous."""
        received = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        self._swap([x] * self.size, received)
        return received

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send `outgoing[peer]` to each peer, and fill `incoming[peer]`."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._exchange.swap(
            {peer: bytes_of(outgoing[peer]) for peer in peers}, {peer: bytes_of(incoming[peer]) for peer in peers}
        )
