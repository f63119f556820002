"""`Float8Source`: shows weights in fp8 (float8_e4m3fn), with their scales, as weights in the engine's dtype.

Beside a tensor T in fp8 is the tensor of its scales, T_scale_inv or T_scale. In spite of the first name, values are always
multiplied by them. There is one scale for the whole weight, one for each row, or one for each block of rows and columns;
config.json has the size of a block. The last block of a row or column may be smaller. A stacked tensor of all experts of a
layer has the scales of each expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from inflight.config.weight_room import gibibytes
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.float8 import LARGEST, Scales, dequantize_float8, first_nan
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource

_FLOAT8 = "F8_E4M3"
_SCALE_ENDS = ("_scale_inv", "_scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# The last parts of the names of scales that are not used, because activations and the KV cache are not rounded to fp8.
_UNUSED = (
    "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale",
)  # fmt: skip
_OF_WEIGHTS = (".weight", "_proj")  # the ends of names of weights that may have scales
_UNUSED_END = "_activation_scale"  # of stacked experts


@dataclass(frozen=True)
class _Weight:
    """A weight in fp8: the name of its scales, their shape without that of experts, and the size of a block."""

    scales: str
    grid: tuple[int, int]
    block: tuple[int, int]


class Float8Source(WeightSource):
    """The tensors of `stored`, in which those in fp8 have become floats of `dtype`.

    Args:
        blocks: the rows and columns of a block, as config.json gives them; None if it has no blocks.
        quantization: how the floats are quantized afterwards, for `notice`.
        has_other_formats: whether there may be weights in other formats that have scales, too.

    Raises:
        CheckpointError: a weight lacks its scales, or their shape or dtype is wrong. While weights are read: a weight or a
            scale has an element that is NaN or infinite.
    """

    def __init__(
        self,
        stored: WeightSource,
        blocks: tuple[int, int] | None,
        dtype: torch.dtype,
        *,
        quantization: str | None = None,
        has_other_formats: bool = False,
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._weights: dict[str, _Weight] = {}
        self.tensors = dict(stored.tensors)
        self.name_in_file = stored.name_in_file
        for name, tensor in stored.tensors.items():
            if tensor.dtype == _FLOAT8:
                weight = _find_scales(name, stored.tensors, blocks)
                self._weights[name] = weight
                self.tensors[name] = replace(tensor, dtype=_NAMES[dtype])
                self.tensors.pop(weight.scales, None)
                continue
            found = _scales_of(name, stored.tensors)
            if found and (tensor.dtype in _NAMES.values() or not has_other_formats):
                scales = stored.tensors[found[0]]
                raise CheckpointError(
                    f"{scales.stored_name} in {scales.file} has scales, but {tensor.stored_name} in {tensor.file} is stored as "
                    f"{tensor.dtype}, not in fp8 ({_FLOAT8}); remove the scales if the weight has been multiplied by them"
                )
            if not has_other_formats:
                _check_weight_of_scales(name, stored.tensors)
        unused = [name for name in self.tensors if _is_unused(name)] if self._weights else []
        for name in unused:
            del self.tensors[name]
        self.unlisted = set(stored.unlisted) & self.tensors.keys()
        if self._weights:
            self.notice = self._describe(quantization, unused)

    def _describe(self, quantization: str | None, unused: list[str]) -> str:
        num_weights = sum(prod(self.tensors[name].shape) for name in self._weights)
        held = quantization or str(self._dtype).removeprefix("torch.")
        bits = {"int4": 4, "int8": 8, "fp8": 8}.get(held, 8 * self._dtype.itemsize)
        line = (
            f"{len(self._weights)} weights are stored in fp8 ({gibibytes(num_weights)}) and held as {held} "
            f"({gibibytes(num_weights * bits / 8)} of memory)"
        )
        if quantization is None:
            line += "; --quantization int8 or int4 would make them smaller"
        if unused:
            line += f"; {len(unused)} scales, such as {unused[0]}, are not used: activations and keys are not rounded to fp8"
        return line

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with self._stored.open() as read_stored:

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                weight = self._weights.get(name)
                if weight is None:
                    return read_stored(name, shard)
                shape = self.tensors[name].shape
                if len(shape) == 2:
                    return self._read(name, weight, (), shard, read_stored)
                experts, *held = shard
                parts = (
                    self._read(name, weight, (slice(index, index + 1),), tuple(held), read_stored)
                    for index in range(*experts.indices(shape[0]))
                )
                return torch.stack(list(parts))

            yield read

    def _read(
        self, name: str, weight: _Weight, expert: ShardSlices, shard: ShardSlices, read_stored: ReadPart
    ) -> Tensor:
        """Reads a part of the weight, or of one expert's: `expert` is () or the expert's slice."""
        rows, columns = shard
        num_rows, num_columns = self.tensors[name].shape[-2:]
        first_row = rows.indices(num_rows)[0]
        first_column = columns.indices(num_columns)[0]
        values = read_stored(name, (*expert, rows, columns))
        assert isinstance(values, Tensor), "safetensors are plain"
        if expert:
            values = values[0]
        sizes_of_scales = self._stored.tensors[weight.scales].shape[len(expert) :]
        all_scales = tuple(slice(0, size) for size in sizes_of_scales)
        scales = read_stored(weight.scales, (*expert, *all_scales))
        assert isinstance(scales, Tensor), "safetensors are plain"
        if place := first_nan(values):
            row = first_row + place[0]
            column = first_column + place[1]
            raise self._damaged(name, f"a NaN (the byte 0x7f or 0xff) in row {row}, column {column}")
        grid = scales.float().reshape(weight.grid)
        if not bool((grid * LARGEST).isfinite().all()):
            raise self._damaged(
                weight.scales, "a scale that is NaN, infinite, or too large for the product with a weight"
            )
        return dequantize_float8(
            values, Scales(grid, weight.block), self._dtype, first_row=first_row, first_column=first_column
        )

    def _damaged(self, name: str, what: str) -> CheckpointError:
        stored = self._stored.tensors[name]
        return CheckpointError(f"{stored.place(name)} has {what}; the file is damaged, download it again")


def _is_unused(name: str) -> bool:
    return name.rpartition(".")[2] in _UNUSED or name.endswith(_UNUSED_END)


def _scales_of(name: str, tensors: dict[str, StoredTensor]) -> list[str]:
    return [name + end for end in _SCALE_ENDS if name + end in tensors]


def _check_weight_of_scales(name: str, tensors: dict[str, StoredTensor]) -> None:
    """Refuses scales of a weight that is not there."""
    for end in _SCALE_ENDS:
        weight = name.removesuffix(end)
        if name.endswith(end) and weight not in tensors and weight.endswith(_OF_WEIGHTS) and not _is_unused(name):
            scales = tensors[name]
            raise CheckpointError(
                f"{scales.stored_name} in {scales.file} has scales, but the checkpoint lacks their weight, "
                f"{scales.stored_name.removesuffix(end)}"
            )


def _find_scales(name: str, tensors: dict[str, StoredTensor], blocks: tuple[int, int] | None) -> _Weight:
    """Finds the scales of a weight, and checks their shape and dtype."""
    weight = tensors[name]
    where = f"{weight.place(name)} is stored in fp8 with the shape {list(weight.shape)}"
    if len(weight.shape) not in (2, 3) or 0 in weight.shape:
        raise CheckpointError(
            f"{where}; only weights of two dimensions, or three with all experts of a layer, can be in fp8"
        )
    found = _scales_of(name, tensors)
    if not found:
        raise CheckpointError(
            f"{where}, but the checkpoint lacks its scales: {' or '.join(weight.stored_name + e for e in _SCALE_ENDS)}"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{where}, and has two tensors of scales, {' and '.join(tensors[each].stored_name for each in found)}; "
            "remove the one that is wrong"
        )
    scales = tensors[found[0]]
    if scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{scales.place(found[0])} is stored as {scales.dtype}; supported are {', '.join(_SCALE_DTYPES)}"
        )
    *experts, num_rows, num_columns = weight.shape
    # the numbers of blocks -> their sizes
    grids = {(1, 1): (num_rows, num_columns), (num_rows, 1): (1, num_columns)}
    if blocks is not None:
        num_row_blocks = -(-num_rows // blocks[0])
        num_column_blocks = -(-num_columns // blocks[1])
        grids[num_row_blocks, num_column_blocks] = blocks
    for grid, block in grids.items():
        shapes = [(*experts, *grid)]
        if grid[1] == 1:
            shapes.append((*experts, grid[0]))
        if grid == (1, 1):
            shapes.append(tuple(experts))
        if scales.shape in shapes:
            return _Weight(found[0], grid, block)
    for_each = " for each expert" if experts else ""
    of_blocks = ""
    if blocks is not None:
        of_blocks = f", or for each block of {blocks[0]} x {blocks[1]}"
    known = [[*experts, *grid] for grid in grids]
    raise CheckpointError(
        f"{scales.place(found[0])} has the shape {list(scales.shape)}, "
        f"and its weight {list(weight.shape)}; "
        f"supported is one scale{for_each}, one for each row{of_blocks}: {known}"
    )
