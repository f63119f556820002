"""`QKNorm`, an RMSNorm over every query and key head, and `WholeQKNorm`, one over all of them together."""

import torch
from torch import Tensor, nn

from inflight.layers.context import LayerContext
from inflight.layers.sharding import OutputShard
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots


class QKNorm(Loadable):
    """The weights of an RMSNorm over each query and key head: one row of head_dim weights per head. The attention backend
    computes the norm, before it rotates the heads.

    The checkpoint has one weight for all query heads and, if there are key heads, one for all of these. Their names, `q_norm`
    and `k_norm`, replace the name of this layer. `order`: the dimensions of a head in the checkpoint, in the order of this
    layer (None: the same order). `offset` is added to the weights of the checkpoint.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        context: LayerContext,
        *,
        order: Tensor | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        ones = torch.ones(num_heads + num_kv_heads, head_dim, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(ones, False)
        self.num_heads = num_heads
        self.order = order
        self.offset = offset
        self.eps = eps

    def weight_slots(self, prefix: str) -> WeightSlots:
        weights = self.weight.data
        block = prefix.rpartition(".")[0]
        first_rows = {"q_norm": 0, "k_norm": self.num_heads}
        for name, weight in [(name, weights[row]) for name, row in first_rows.items() if row < len(weights)]:
            slot = WeightSlot(
                shape=tuple(weight.shape), destination=weight, is_scale=True, rows=self.order, offset=self.offset
            )
            yield f"{block}.{name}.weight", slot

    def finish_loading(self) -> None:
        rows = self.weight.data
        rows[1 : self.num_heads] = rows[0]
        rows[self.num_heads + 1 :] = rows[self.num_heads : self.num_heads + 1]


class WholeQKNorm(Loadable):
    """An RMSNorm over all query heads of a token together, and one over all its key heads. Their names in the checkpoint are
    those of `QKNorm`. `query` and `key` are the parts of the projections that this rank holds.
    """

    def __init__(self, query: OutputShard, key: OutputShard, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.parts = {"q_norm": query, "k_norm": key}
        ones = torch.ones(query.size + key.size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(ones, False)
        # made here: while a CUDA graph is recorded, no tensor can be made from numbers of the host
        self.totals = torch.tensor([query.total, key.total], dtype=torch.float32, device=context.device)
        self.eps = eps
        self.tp = context.tp
        self.ops = context.ops

    def weight_slots(self, prefix: str) -> WeightSlots:
        block = prefix.rpartition(".")[0]
        offset = 0
        for name, part in self.parts.items():
            weight = self.weight.data[offset : offset + part.size]
            slot = WeightSlot(shape=(part.total,), destination=weight, start=part.start, is_scale=True, rows=part.order)
            yield f"{block}.{name}.weight", slot
            offset += part.size

    def forward(self, projected: Tensor) -> None:
        """Norms the queries and keys in `projected`, [num_tokens, queries + keys + values], in place."""
        sizes = [part.size for part in self.parts.values()]
        pieces = torch.split(projected[:, : sum(sizes)], sizes, dim=1)
        weights = torch.split(self.weight, sizes)
        if self.tp.size == 1:
            for piece, weight in zip(pieces, weights, strict=True):
                self.ops.norm_heads(piece.unsqueeze(1), weight.unsqueeze(0), self.eps)  # as if it were one head
            return
        wide = [piece.float() for piece in pieces]
        # If several ranks hold a copy of the same heads, each of them adds only its share of the sum.
        shares = [part.total / (part.size * self.tp.size) for part in self.parts.values()]
        squares = [x.square().sum(dim=1) * share for x, share in zip(wide, shares, strict=True)]
        sums = self.tp.all_reduce(torch.stack(squares, dim=1))  # [num_tokens, 2]
        scales = (sums / self.totals + self.eps).rsqrt_()
        for piece, x, scale, weight in zip(pieces, wide, scales.unbind(1), weights, strict=True):
            piece.copy_(x.mul_(scale[:, None]).mul_(weight))
