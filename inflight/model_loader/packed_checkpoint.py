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

_PLAIN = "weight"  # the suffix of a weight that is not quantized, and of some that are


class PackedCheckpoint(WeightSource):
    """The tensors of `stored`, in which the tensors of each quantized module are one weight, `<module>.weight`.

    A module counts as quantized if it has a tensor with one of `PackedLayout.suffixes` other than "weight". What config.json
    says about single modules is not read.
    """

    def __init__(self, stored: WeightSource, weight_format: str) -> None:
        self._stored = stored
        self._layout = LAYOUTS[weight_format]()
        self._modules: dict[str, _Module] = {}  # by the name of the weight
        self.tensors = dict(stored.tensors)
        self.unlisted = stored.unlisted
        self.notice = stored.notice
        self.name_in_file = stored.name_in_file
        # a weight that lacks one of its tensors shall be refused for this, whichever it is
        modules = dict.fromkeys(
            name.rpartition(".")[0] for name, tensor in stored.tensors.items() if self._is_mark(name, tensor)
        )
        with stored.open() as read:
            for module in modules:
                self._add_module(module, weight_format, _reader_of(module, read))
        self._check_optional_parts()

    def _is_mark(self, name: str, tensor: StoredTensor) -> bool:
        """Whether only a quantized module has this tensor."""
        suffix = name.rpartition(".")[2]
        return suffix in self._layout.suffixes and (suffix != _PLAIN or tensor.dtype == "I8")

    def _add_module(self, module: str, weight_format: str, read: ReadTensor) -> None:
        parts = {
            suffix: self.tensors.pop(f"{module}.{suffix}")
            for suffix in self._layout.suffixes
            if f"{module}.{suffix}" in self.tensors
        }
        weight = f"{module}.{_PLAIN}"
        values = next((parts[suffix] for suffix in self._layout.values if suffix in parts), None)
        first = values or next(iter(parts.values()))
        file = first.file
        stored_module = first.stored_name.rpartition(".")[0]
        if weight in self.tensors:
            raise CheckpointError(
                f"{stored_module} is there twice: quantized in {file}, and plain in {self.tensors[weight].file}; remove one"
            )
        missing = [f"{stored_module}.{suffix}" for suffix in self._layout.lacking(parts)]
        if missing:
            found = ", ".join(part.stored_name for part in parts.values())
            raise CheckpointError(
                f"{file}: {stored_module} is quantized (it has {found}), but the checkpoint lacks {', '.join(missing)}"
            )
        try:
            shape = self._layout.weight_shape(parts, read)
        except ValueError as error:
            found = ", ".join(f"{part.stored_name} {part.dtype} {list(part.shape)}" for part in parts.values())
            raise CheckpointError(
                f"{stored_module} in {file} cannot be read as a {weight_format} weight: {error}; found {found}"
            ) from error
        self.tensors[weight] = StoredTensor(file, first.stored_name, shape, weight_format, is_quantized=True)
        self._modules[weight] = _Module(module, parts, shape)

    def _check_optional_parts(self) -> None:
        """Refuses a module that lacks zero points or the groups of inputs, if the same module of another layer has them: its
        weight would be read as another one."""
        usual: dict[tuple[str, str], _Module] = {}  # by the last part of the name, and the tensor of the integers
        for weight, module in self._modules.items():
            kind = module.name.rpartition(".")[2], self.tensors[weight].stored_name.rpartition(".")[2]
            other = usual.setdefault(kind, module)
            if other.parts.keys() == module.parts.keys():
                continue
            has_more = len(module.parts) > len(other.parts)
            more = module if has_more else other
            less = other if has_more else module
            lacking = next(suffix for suffix in more.parts if suffix not in less.parts)
            there = more.parts[lacking]
            found = next(iter(less.parts.values()))
            stored_module = found.stored_name.rpartition(".")[0]
            raise CheckpointError(
                f"{found.file}: {found.stored_name} is there, but {stored_module}.{lacking} is missing; "
                f"{there.stored_name} is in {there.file}. Download the model again"
            )

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
                    raise CheckpointError(f"{self.tensors[name].place(name)}: {error}") from error
                return shard_columns(weight, columns, self.tensors[name].place(name))

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
