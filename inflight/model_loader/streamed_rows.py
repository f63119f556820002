"""`StreamedRows`: a weight of a checkpoint of which some rows at a time are read (`WeightRows`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.weight_rows import LARGE, WeightRows, form_of
from inflight.layers.weights import WeightSlot
from inflight.model_loader.weight_source import StoredTensor, WeightSource

_Check = Callable[[str, Tensor | QuantizedWeight], Tensor | QuantizedWeight]


class StreamedRows(WeightRows):
    """The part `held` of a weight. Floats are read in `dtype`. `check`: gets the name and each part that is read.

    The source is opened for each read, so that the pages of a mapped file do not stay in the process.
    """

    def __init__(
        self, source: WeightSource, name: str, held: Sequence[slice], dtype: torch.dtype, check: _Check
    ) -> None:
        rows, columns = held
        self.shape = (rows.stop - rows.start, columns.stop - columns.start)
        self._source = source
        self._name = name
        self._first_row = rows.start
        self._columns = columns
        self._dtype = dtype
        self._check = check
        self.form = form_of(self.read(0, 1))

    def read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        rows = slice(self._first_row + start, self._first_row + stop)
        with self._source.open() as read:
            part = self._check(self._name, read(self._name, (rows, self._columns)))
        if isinstance(part, QuantizedWeight):
            return part
        floats = part.to(self._dtype)
        return floats if floats.stride(1) == 1 else floats.contiguous()


def is_streamed(slot: WeightSlot, stored: StoredTensor) -> bool:
    """Whether the part of the tensor that a slot is for is read so: if it is large, or becomes floats."""
    if len(slot.shape) != 2 or slot.rows is not None or slot.offset or slot.destination.is_meta:
        return False  # without memory, `accept` keeps the part for something else
    return slot.destination.numel() >= LARGE or (stored.is_quantized and slot.accept is None)


def fill_with_rows(slot: WeightSlot, rows: StreamedRows) -> bool:
    """Gives a slot the rows, at once or for later. Returns False if the layer does not take rows, but may accept the whole
    part: integers, of which a GPU and plain torch make weights of their own."""
    if slot.accept is not None:
        if slot.accept(rows):
            return True
        if rows.is_quantized:
            return False
    rows.copy_to(slot.destination)
    return True
