"""`WeightSource`: the interface of checkpoints. In every file format, it shows weights under the model's names and shapes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight

ShardSlices = tuple[slice, ...]  # this rank's shard of a tensor: `slice(start, stop)` for each dimension


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, name, shape and dtype, as the header of the file gives them.

    `stored_name` is the name in the file, for messages: that of the integers if the file has several tensors for the weight,
    and that of the whole tensor if the weight is a part of it.
    `shape` is the shape of the weight, even if its integers are packed. `dtype` is the file format's name of a dtype ("BF16",
    "F32", "I8", ...), or the layout of a quantized weight ("gptq", "Q4_0", ...).
    """

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    is_quantized: bool = False

    def place(self, name: str) -> str:
        """For messages: the name in the file, the file and, if it differs, the name in the model, which is `name`."""
        of_model = "" if name == self.stored_name else f" ({name} of the model)"
        return f"{self.stored_name} in {self.file}{of_model}"


class ReadPart(Protocol):
    """Reads a part of one of `WeightSource.tensors`. The part must not be empty.

    A part of a quantized weight is a `QuantizedWeight`, or floats if no `QuantizedWeight` can hold it. Floats have the dtype in
    which they are stored or were computed. They may be a view of the mapped file. The caller drops the view when the block that
    it loads is finished, because the view keeps the file mapped.
    """

    def __call__(self, name: str, shard: ShardSlices) -> Tensor | QuantizedWeight: ...


class WeightSource(ABC):
    """A checkpoint. The constructor reads and checks the headers.

    Raises (in the constructor and in the `with` block of `open`):
        CheckpointError: weights are missing, misshapen, or in an unsupported layout; a file is missing or corrupt.

    Attributes:
        unlisted: tensors that are in the files, but not in the list of the checkpoint's tensors.
        bits_in_memory: the fewest bits that a weight of a linear layer will have, with its part of the scales, on average; None
            if this is not known before the weights are read.
        notice: what a user should know about memory before the weights are read.
        name_in_file: what a tensor of the model would be called in the files, for messages about tensors that are missing.
    """

    tensors: dict[str, StoredTensor]
    unlisted: Collection[str] = ()
    bits_in_memory: float | None = None
    notice: str | None = None
    name_in_file: Callable[[str], str] = staticmethod(str)

    @abstractmethod
    def open(self) -> AbstractContextManager[ReadPart]:
        """Parts can be read in the `with` block. Files are unmapped after the block, when no view of them is left. Then none of
        their pages stay in the process. The loader opens the source once for each block of the model.
        """
