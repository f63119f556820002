"""`read_part`: reads the header of a GGUF file, which has the metadata and the place of each tensor. It reads no tensor.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian:

    "GGUF" version | number of tensors | number of pairs
    each pair      : key, type, value
    each tensor    : name, dimensions (innermost first), type, offset into the data
    padding to the alignment | data

Every count, length and offset is compared with the size of the file before it is used. So a corrupt header cannot cost more
time or memory than a correct header of the same size.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inflight.config.gguf_types import GgufType, gguf_types, type_name
from inflight.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**16
_MAX_SIZE = 2**48  # largest size of one dimension

EMBEDDING = "token_embd.weight"  # the tensor's name

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL = 7
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class GgufStrings:
    """An array of strings that is not decoded yet: `[start, stop)` are its bytes in the file."""

    start: int
    stop: int
    count: int


Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
GgufValue = int | float | bool | str | np.ndarray | GgufStrings  # arrays have one dimension


@dataclass(frozen=True)
class GgufTensor:
    """`shape` has the outermost dimension first, as in torch. `start` is an offset from the beginning of the file `path`."""

    path: Path
    shape: tuple[int, ...]
    type: GgufType
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True)
class GgufFile:
    """The content of a header, or of the headers of all parts of a model. The files themselves are not kept open. `path` is the
    first part."""

    path: Path
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]

    @property
    def paths(self) -> list[Path]:
        """All parts."""
        return sorted({self.path, *(tensor.path for tensor in self.tensors.values())})

    def refusal(self, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {problem}")

    def read_strings(self, array: GgufStrings) -> list[str]:
        """The strings of `array`, which is one of the values of `metadata`."""
        cursor = _Cursor(self.path, _map(self.path), array.start, array.stop)
        return [cursor.string() for _ in range(array.count)]

    def map_tensor(self, name: str, row: int = 0, num_rows: int | None = None) -> Bytes:
        """The bytes of `num_rows` rows of a tensor, from `row` on: [num_rows, bytes of a row], as a view of the mapped file.

        If `num_rows` is None, the result has all rows from `row` on. A tensor of one dimension is one row. Writing to the bytes
        does not change the file.
        """
        tensor = self.tensors[name]
        row_bytes = tensor.shape[-1] // tensor.type.block_size * tensor.type.block_bytes
        total = tensor.num_bytes // row_bytes
        num_rows = total - row if num_rows is None else num_rows
        assert 0 <= row < row + num_rows <= total, (name, row, num_rows)
        try:
            return np.memmap(tensor.path, np.uint8, "c", tensor.start + row * row_bytes, (num_rows, row_bytes))
        except (OSError, ValueError) as error:  # the file became shorter after its header was read
            raise CheckpointError(f"{tensor.path} cannot be read: {error}") from error


def read_part(path: Path) -> GgufFile:
    """
    Raises:
        CheckpointError: the file cannot be read, is no GGUF file, contradicts itself, or has tensors of an unknown type.
        ConfigError: the package `gguf` is not installed.
    """
    data = _map(path)
    cursor = _Cursor(path, data, 0, len(data))
    if bytes(cursor.take(4)) != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with GGUF; download it again")
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"a big-endian file (version {swapped})" if swapped in _VERSIONS else f"GGUF version {version}"
        raise CheckpointError(
            f"{path}: {what} is not supported, only little-endian files of the versions 2 and 3; convert the model again"
        )
    num_tensors = cursor.count("<Q", "tensors", least_bytes=8 + 4 + 8 + 4 + 8)  # with one dimension and no name
    num_pairs = cursor.count("<Q", "metadata pairs", least_bytes=8 + 4 + 1)
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.integer("<I"))
    headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in headers:
            raise cursor.corrupt(f"the tensor {name!r} is there twice")
        headers[name] = cursor.shape(name), cursor.integer("<I"), cursor.integer("<Q")
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(cursor, name, *header, data_start, alignment) for name, header in headers.items()}
    _check_extents(cursor, tensors, data_start, alignment)
    return GgufFile(path, metadata, tensors)


def _map(path: Path) -> memoryview:
    try:
        if not path.stat().st_size:
            return memoryview(b"")
        return np.memmap(path, np.uint8, "r").data
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Cursor:
    """Reads forward through `[position, stop)` of the file, and never beyond `stop`."""

    def __init__(self, path: Path, data: memoryview, position: int, stop: int) -> None:
        self.path = path
        self.position = position
        self._data = data
        self._stop = stop

    def corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: truncated or corrupt as GGUF ({what}); download it again")

    def take(self, size: int) -> memoryview:
        start = self.position
        if size > self._stop - start:
            raise self.corrupt(f"{size} bytes are needed at byte {start}, but only {self._stop - start} are left")
        self.position = start + size
        return self._data[start : start + size]

    def integer(self, kind: str) -> int:
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def count(self, kind: str, what: str, least_bytes: int) -> int:
        """Read how many things (`what`) follow. Each needs at least `least_bytes` bytes. Refuse a number for which the file has
        too few bytes left."""
        count = self.integer(kind)
        if count > (self._stop - self.position) // least_bytes:
            raise self.corrupt(f"{count} {what} cannot be in the {self._stop - self.position} bytes that are left")
        return count

    def string(self) -> str:
        text = bytes(self.take(self.integer("<Q")))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"the string that ends at byte {self.position} is not UTF-8") from error

    def shape(self, name: str) -> tuple[int, ...]:
        num_dimensions = self.integer("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.corrupt(f"{name!r} has {num_dimensions} dimensions")
        shape = tuple(self.integer("<Q") for _ in range(num_dimensions))
        if not all(1 <= size <= _MAX_SIZE for size in shape):
            raise self.corrupt(f"{name!r} has the shape {list(shape)}")
        return shape[::-1]

    def value(self, kind: int) -> GgufValue:
        if kind == _BOOL:
            flag = self.take(1)[0]
            if flag > 1:
                raise self.corrupt(f"the boolean at byte {self.position - 1} is {flag}, neither 0 nor 1")
            return bool(flag)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.integer("<I"))
        if kind not in _NUMBERS:
            raise self.corrupt(f"a value of the unknown type {kind} at byte {self.position}")
        number: int | float = struct.unpack(_NUMBERS[kind], self.take(struct.calcsize(_NUMBERS[kind])))[0]
        return number

    def _array(self, kind: int) -> np.ndarray | GgufStrings:
        if kind == _STRING:
            count = self.count("<Q", "strings", least_bytes=8)
            start = self.position
            self._skip_strings(count)
            return GgufStrings(start, self.position, count)
        number = np.dtype("?" if kind == _BOOL else _NUMBERS.get(kind, "V0"))
        if not number.itemsize:  # arrays of arrays are refused here, too: no model has them
            raise self.corrupt(f"an array of the unknown type {kind} at byte {self.position}")
        count = self.count("<Q", "numbers", least_bytes=number.itemsize)
        return np.frombuffer(self.take(count * number.itemsize), number).copy()

    def _skip_strings(self, count: int) -> None:
        """Move behind `count` strings. For speed, this loop calls no method of the cursor: a tokenizer can have 300,000 strings
        (tokens and merges)."""
        data = self._data
        position = self.position
        stop = self._stop
        unpack_from = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if stop - position < 8:
                raise self.corrupt(f"strings go on beyond byte {stop}")
            position += 8 + unpack_from(data, position)[0]
        if position > stop:
            raise self.corrupt(f"strings go on beyond byte {stop}")
        self.position = position


def _alignment(cursor: _Cursor, metadata: Mapping[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 8 <= alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power:
        raise cursor.corrupt(f"general.alignment={alignment!r} is no power of two from 8 to {_MAX_ALIGNMENT}")
    assert isinstance(alignment, int)
    return alignment


def _tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int, alignment: int
) -> GgufTensor:
    types = gguf_types()
    if kind not in types:
        raise CheckpointError(
            f"{cursor.path}: {name} is stored as {type_name(kind)}, which is not read; supported: "
            f"{', '.join(each.name for each in types.values())}: use a file made with Q4_K_M, Q4_0 or Q8_0"
        )
    if shape[-1] % types[kind].block_size:
        raise cursor.corrupt(f"{name!r} has rows of {shape[-1]} weights, not a multiple of {types[kind].block_size}")
    if offset % alignment:
        raise cursor.corrupt(f"{name!r} is at offset {offset}, which is not aligned to {alignment}")
    return GgufTensor(cursor.path, shape, types[kind], data_start + offset)


def _check_extents(cursor: _Cursor, tensors: Mapping[str, GgufTensor], data_start: int, alignment: int) -> None:
    """Each tensor begins where the one before it ends, but for the padding to the alignment. llama.cpp asks for this, too. So a
    wrong offset cannot give a tensor the bytes of something else."""
    size = cursor.path.stat().st_size
    stop = data_start
    for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1].start):
        if tensor.start < stop:
            raise cursor.corrupt(f"{name!r} overlaps the tensor before it")
        if tensor.start >= stop + alignment:
            raise cursor.corrupt(f"{name!r} begins at byte {tensor.start}, but what is before it ends at byte {stop}")
        stop = tensor.start + tensor.num_bytes
        if stop > size:
            raise cursor.corrupt(f"{name!r} ends at byte {stop}, but the file ends at byte {size}")
