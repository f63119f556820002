"""`Adapter`: a layer of Inflight in the place of a module of transformers.

Adapters are called a few hundred times in a step. So they are called directly, without the part of `nn.Module` that looks for
hooks.
"""

from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from inflight.kernels.layer_ops import LayerOps
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.vocab import LogitsHead
from inflight.layers.weights import Loadable


class _CalledDirectly(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: what `forward` has
        return self.forward(*args, **kwargs)


class Adapter(_CalledDirectly):
    """A layer whose rows are inputs of any shape [..., in_features]."""

    def __init__(self, inner: Loadable) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner.forward(_rows(x))
        return out.view(*x.shape[:-1], out.shape[-1])


class FusedAdapter(Adapter):
    """The first of several projections of one input, which are computed in one multiplication."""

    def __init__(self, inner: ColumnParallelLinear) -> None:
        super().__init__(inner)
        ends = accumulate((part.size for part in inner.parts.values()), initial=0)
        self._own, *self._others = (slice(start, stop) for start, stop in pairwise(ends))
        self._last: tuple[Tensor, Tensor] | None = None  # input and result, until the last part has been read

    def with_parts(self) -> list[nn.Module]:
        """The modules of all projections."""
        return [self, *(_Projection(self, columns) for columns in self._others)]

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self._own)

    def project(self, x: Tensor, columns: slice) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, super().forward(x)
        out = self._last[1]
        if columns.stop == out.shape[-1]:
            self._last = None
        return out[..., columns]


class _Projection(_CalledDirectly):
    def __init__(self, first: FusedAdapter, columns: slice) -> None:
        super().__init__()
        self._project = first.project
        self._columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return self._project(x, self._columns)


class HeadAdapter(Adapter):
    """The logits head, for hidden states [1, num_rows, hidden_size]."""

    def __init__(self, head: LogitsHead, bias: nn.Parameter | None) -> None:
        super().__init__(head)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.bias is None else logits + self.bias


class NormAdapter(_CalledDirectly):
    """An RMSNorm over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float, ops: LayerOps) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._ops = ops

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._ops.rms_norm(_rows(hidden_states), self.weight, self._eps).view(hidden_states.shape)


def _rows(x: Tensor) -> Tensor:
    """[..., size] -> [num_rows, size], with contiguous rows, which the kernels need."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
