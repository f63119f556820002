"""`PackedCheckpoint`: reads safetensors in which a linear weight is several tensors (GPTQ, AWQ and compressed-tensors)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from inflight.config.weight_format import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.compressed_tensors import CompressedTensors
from inflight.model_loader.gptq import Awq, Gptq
from inflight.model_loader.packing import PackedLayout, ReadTensor, shard_columns
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource

LAYOUTS: Mapping[str, Callable[[], PackedLayout]] = {
    GPTQ: lambda: Gptq(stored_zero_offset=1),
    GPTQ_V2: lambda: Gptq(stored_zero_offset=0),
    AWQ: Awq,
    COMPRESSED_TENSORS: CompressedTensors,
}


class PackedCheckpoint(WeightSource):
    """The tensors of `stored`, in which the tensors of each quantized module are one weight, `<module>.weight`.

    A module counts as quantized if it has a tensor with the suffix `PackedLayout.marker`. What config.json says about single
    modules is not read.
    """

    def __init__(self, stored: WeightSource, weight_format: str) -> None:
        self._stored = stored
        self._layout = LAYOUTS[weight_format]()
        self._modules: dict[str, _Module] = {}  # by the name of the weight
        self.tensors = dict(stored.tensors)
        self.unlisted = stored.unlisted
        self.notice = stored.notice
        with stored.open() as read:
            for name in stored.tensors:
                module, _, suffix = name.rpartition(".")
                if suffix == self._layout.marker:
                    self._add_module(module, weight_format, _reader_of(module, read))

    def _add_module(self, module: str, weight_format: str, read: ReadTensor) -> None:
        parts = {
            suffix: self.tensors.pop(f"{module}.{suffix}")
            for suffix in self._layout.suffixes
            if f"{module}.{suffix}" in self.tensors
        }
        weight = f"{module}.weight"
        file = parts[self._layout.marker].file
        if weight in self.tensors:
            raise CheckpointError(
                f"{weight} is there twice: quantized in {file}, and plain in {self.tensors[weight].file}"
            )
        missing = [suffix for suffix in self._layout.required if suffix not in parts]
        if missing:
            raise CheckpointError(f"{module} in {file} is quantized, but lacks {', '.join(missing)}")
        try:
            shape = self._layout.weight_shape(parts, read)
        except ValueError as error:
            shapes = {suffix: f"{part.dtype} {list(part.shape)}" for suffix, part in parts.items()}
            found = ", ".join(f"{suffix} {shape}" for suffix, shape in shapes.items())
            raise CheckpointError(
                f"{module} in {file} cannot be read as a {weight_format} weight: {error}; found {found}"
            ) from error
        self.tensors[weight] = StoredTensor(file, shape, weight_format, is_quantized=True)
        self._modules[weight] = _Module(module, parts, shape)

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with self._stored.open() as read_stored:

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                module = self._modules.get(name)
                if module is None:
                    return read_stored(name, shard)
                rows, columns = shard
                start, stop, _ = rows.indices(module.shape[0])
                try:
                    weight = self._layout.read(
                        module.parts, module.shape, _reader_of(module.name, read_stored), start, stop
                    )
                except ValueError as error:
                    raise CheckpointError(f"{module.name} in {self.tensors[name].file}: {error}") from error
                return shard_columns(weight, columns, name)

            yield read


@dataclass(frozen=True)
class _Module:
    """A quantized module: its name, its tensors by suffix, and the shape of its weight."""

    name: str
    parts: Mapping[str, StoredTensor]
    shape: tuple[int, int]


def _reader_of(module: str, read: ReadPart) -> ReadTensor:
    def read_tensor(suffix: str, part: ShardSlices) -> Tensor:
        tensor = read(f"{module}.{suffix}", part)
        assert isinstance(tensor, Tensor), "safetensors are plain"
        return tensor

    return read_tensor
