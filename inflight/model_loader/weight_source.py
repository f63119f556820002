"""`WeightSource`: weights by the names and shapes that the model has for them, however their files hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from inflight.layers.quantized_weight import QuantizedWeight

Held = tuple[slice, ...]  # the part of a tensor that is wanted: `slice(start, stop)` of each dimension


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what its header says.

    `shape` is that of the weight, not of what it is packed into. `dtype` is the format's name: "BF16", "F32", "I8", ...; of a
    quantized weight, its layout's: "gptq", "Q4_0", ...
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    is_quantized: bool = False


class ReadPart(Protocol):
    """Reads a part of a tensor of `WeightSource.tensors`, which is not empty.

    Of a quantized weight the part is a `QuantizedWeight` where its layout has one, and floats where it has none. Floats come
    in the dtype they are stored or were computed in; they may be a view of the file, and are dropped before the next call.
    """

    def __call__(self, name: str, held: Held) -> Tensor | QuantizedWeight: ...


class WeightSource(ABC):
    """A checkpoint. The constructor reads headers, and checks what they can tell.

    Raises (constructor and `open`'s block):
        CheckpointError: weights are missing, misshapen, or in a layout that is not read; a file is missing or corrupt.
    """

    tensors: dict[str, StoredTensor]

    @abstractmethod
    def open(self) -> AbstractContextManager[ReadPart]:
        """Within the block parts can be read; the files read are mapped until its end, and no longer.

        So their pages do not stay in the process: a block of the model is read in one such block.
        """
