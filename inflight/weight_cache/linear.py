"""Linear methods that record what is made of the weights, and linear methods that return what was recorded.

A unit prepares its weights in a fixed order. So the calls of a unit are a list, which `NotedLinear` writes and `MappedLinear`
reads. The layers of a mapped unit have weights on the meta device, with shapes but without values.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from inflight.kernels.cpu.functions import LinearWeight
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packed_heads import PackedHeads
from inflight.kernels.gate import GATE_CODES
from inflight.kernels.weight_rows import StoredWeight
from inflight.layers.linear_method import LinearMethod, PreparedExperts, PreparedHeads, PreparedLinear
from inflight.weight_cache.packed_file import PackedFile, PackedFileError, StoredProduct

Calls = list[tuple[PackedLinear, ...] | None]  # None: a product that the kernels do not compute
_POINTERS = ("packed", "bias")
_TABLE = "table"
_NUMBERS = tuple(field[0] for field in LinearWeight._fields_ if field[0] not in (*_POINTERS, _TABLE))


class _Wrapper(LinearMethod):
    def __init__(self, method: LinearMethod) -> None:
        self._method = method
        self.copies_weights = method.copies_weights

    def prepare_experts(
        self,
        gate_up: Sequence[PreparedLinear],
        down: Sequence[PreparedLinear],
        gate: str,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> PreparedExperts | None:
        return self._method.prepare_experts(gate_up, down, gate, shared)

    def is_batch_invariant(self, in_features: int) -> bool:
        return self._method.is_batch_invariant(in_features)


class NotedLinear(_Wrapper):
    """Works as `method`, and adds to `calls` what each call has made."""

    def __init__(self, method: LinearMethod, calls: Calls) -> None:
        super().__init__(method)
        self._calls = calls

    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        made = self._method.prepare(weight, bias, gate=gate)
        self._calls.append((made,) if isinstance(made, PackedLinear) else None)
        return made

    def prepare_heads(self, weights: Tensor) -> PreparedHeads:
        made = self._method.prepare_heads(weights)
        self._calls.append(tuple(made.heads) if isinstance(made, PackedHeads) else None)
        return made


class MappedLinear(_Wrapper):
    """Returns the products of a packed file. Of the given weights only the shapes are used: they must be those of the file.

    Args:
        next_call: the products of the next call of the unit that is loaded now.

    Raises (in both methods):
        PackedFileError: the file has no such product.
    """

    def __init__(
        self,
        method: LinearMethod,
        kernels: ctypes.CDLL,
        file: PackedFile,
        next_call: Callable[[], tuple[StoredProduct, ...]],
    ) -> None:
        super().__init__(method)
        self._kernels = kernels
        self._file = file
        self._next_call = next_call

    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        assert isinstance(weight, Sequence), "mapped units are not filled"
        shape = sum(len(part) for part in weight), weight[0].shape[1]
        products = self._next_call()
        if len(products) != 1:
            raise PackedFileError("it has another number of products than expected")
        return self._product(products[0], shape, GATE_CODES[gate], has_bias=bias is not None)

    def prepare_heads(self, weights: Tensor) -> PreparedHeads:
        products = self._next_call()
        if len(products) != len(weights):
            raise PackedFileError(f"it has {len(products)} heads, not {len(weights)}")
        shape = weights.shape[1], weights.shape[2]
        heads = [self._product(each, shape, GATE_CODES[None], has_bias=False) for each in products]
        return PackedHeads(self._kernels, heads)

    def _product(self, stored: StoredProduct, shape: tuple[int, int], gate: int, *, has_bias: bool) -> PackedLinear:
        dtype = getattr(torch, stored.dtype, None)
        if len(stored.fields) != len(_NUMBERS) or len(stored.table) != 16 or not isinstance(dtype, torch.dtype):
            raise PackedFileError("it describes a product in an unknown format")
        weight = LinearWeight(**dict(zip(_NUMBERS, stored.fields, strict=True)))
        weight.table = (ctypes.c_int8 * 16)(*stored.table)
        if (weight.out_features, weight.in_features, weight.gate) != (*shape, gate):
            raise PackedFileError(f"it has a product of {weight.out_features} x {weight.in_features}, not {shape}")
        if (stored.bias is not None) != has_bias:
            raise PackedFileError("it has a product with a bias where none is expected, or without an expected bias")
        num_bytes, num_lanes = ctypes.c_int64(), ctypes.c_int64()
        self._kernels.inflight_packed_size(weight, num_bytes, num_lanes)
        packed = self._file.tensor(stored.packed)
        bias = None if stored.bias is None else self._file.tensor(stored.bias)
        if packed.dtype != torch.uint8 or packed.shape != (num_bytes.value,):
            raise PackedFileError("it has a weight of the wrong size")
        weight.packed = packed.data_ptr()
        if bias is not None:
            if bias.dtype != torch.float32 or bias.shape != (num_lanes.value,):
                raise PackedFileError("it has a bias of the wrong size")
            weight.bias = bias.data_ptr()
        return PackedLinear(self._kernels, weight, dtype, packed, bias)


def numbers_of(weight: LinearWeight) -> tuple[tuple[int | float, ...], tuple[int, ...]]:
    """The fields of `StoredProduct` that describe a weight."""
    return tuple(getattr(weight, name) for name in _NUMBERS), tuple(weight.table)


def next_of(calls: Iterator[tuple[StoredProduct, ...]]) -> tuple[StoredProduct, ...]:
    found = next(calls, None)
    if found is None:
        raise PackedFileError("it has fewer products than the model")
    return found
