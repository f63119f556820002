"""`Mxfp4Source`: shows the weights of experts that are stored in MXFP4, as gpt-oss's are, as quantized weights or as floats.

Beside a tensor `T_blocks`, uint8 [experts, rows, groups, 16], is `T_scales`, uint8 [experts, rows, groups]. A byte of a block
has two neighbouring weights, the first one in its low half. config.json also lists the modules that are not in MXFP4. This
list is not read: the names of a module's tensors say it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from inflight.config.weight_format import MXFP4
from inflight.config.weight_room import gibibytes
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.mxfp4 import BITS, GROUP_SIZE, MOST_EXPONENT, mxfp4_weight
from inflight.model_loader.packing import ALL, shard_columns, unpack_nibbles
from inflight.model_loader.weight_source import ReadPart, ShardSlices, WeightSource

_BLOCKS = "_blocks"
_SCALES = "_scales"
_GROUP_BYTES = GROUP_SIZE // 2
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Mxfp4Source(WeightSource):
    """The tensors of `stored`, in which `T_blocks` and `T_scales` have become `T`, a quantized weight [experts, rows, columns].
    A part of one expert can be read, whose rows may have a step.

    Args:
        floats: if it is given, `T` has become floats of this dtype, [experts, columns, rows], as transformers' code has them.

    Raises:
        CheckpointError: one of the two tensors is missing, or has another dtype or shape; no tensor is in MXFP4. While
            weights are read: a scale is NaN, or so large that no model has it.
    """

    def __init__(self, stored: WeightSource, floats: torch.dtype | None = None) -> None:
        self._stored = stored
        self._floats = floats
        self._weights: dict[str, tuple[int, ...]] = {}  # name -> experts, rows, columns
        self.tensors = dict(stored.tensors)
        self.name_in_file = stored.name_in_file
        for name in stored.tensors:
            for end in (_BLOCKS, _SCALES):
                if name.endswith(end) and name in self.tensors:
                    self._add(name.removesuffix(end))
        self.unlisted = set(stored.unlisted) & self.tensors.keys()
        if not self._weights:
            raise CheckpointError(
                "config.json says that weights are in MXFP4 (quantization_config), but no tensor is: their names end with "
                f"{_BLOCKS} and {_SCALES}. If the weights were converted, remove quantization_config from config.json"
            )
        bits = BITS if floats is None else 8 * floats.itemsize
        num_weights = sum(map(prod, self._weights.values()))
        if floats is None:
            num_others = sum(prod(each.shape) for name, each in self.tensors.items() if name not in self._weights)
            self.bits_in_memory = ((BITS + 16 / GROUP_SIZE) * num_weights + 16 * num_others) / (
                num_weights + num_others
            )
        self.notice = (
            f"{len(self._weights)} tensors of experts are stored in MXFP4 ({gibibytes(num_weights / 2)}) and held in {bits} "
            f"bits ({gibibytes(num_weights * bits / 8)} of memory), which changes no weight"
        )

    def _add(self, name: str) -> None:
        """Replaces the two tensors of a weight by the weight."""
        blocks = self.tensors.pop(name + _BLOCKS, None)
        scales = self.tensors.pop(name + _SCALES, None)
        if blocks is None or scales is None:
            found = _SCALES if blocks is None else _BLOCKS
            lacking = _BLOCKS if blocks is None else _SCALES
            there = self._stored.tensors[name + found]
            whole = there.stored_name.removesuffix(found)
            raise CheckpointError(
                f"{whole}{found} is in {there.file}, but {whole}{lacking} is missing; download the model again"
            )
        whole = blocks.stored_name.removesuffix(_BLOCKS)
        if name in self.tensors:
            raise CheckpointError(
                f"{whole} is there twice: in MXFP4 in {blocks.file}, and plain in {self.tensors[name].file}; remove one"
            )
        fits = blocks.dtype == scales.dtype == "U8" and len(scales.shape) == 3
        if not fits or blocks.shape != (*scales.shape, _GROUP_BYTES):
            raise CheckpointError(
                f"{whole} in {blocks.file} cannot be read as MXFP4: {_BLOCKS} should be U8 [experts, rows, groups, "
                f"{_GROUP_BYTES}] and {_SCALES} U8 [experts, rows, groups]; found {blocks.stored_name} {blocks.dtype} "
                f"{list(blocks.shape)} and {scales.stored_name} {scales.dtype} {list(scales.shape)}"
            )
        num_experts, num_rows, num_groups = scales.shape
        num_columns = num_groups * GROUP_SIZE
        self._weights[name] = num_experts, num_rows, num_columns
        self.tensors[name] = (
            replace(blocks, shape=self._weights[name], dtype=MXFP4, is_quantized=True)
            if self._floats is None
            else replace(blocks, shape=(num_experts, num_columns, num_rows), dtype=_NAMES[self._floats])
        )

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with self._stored.open() as read_stored:

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                if name not in self._weights:
                    return read_stored(name, shard)
                if self._floats is None:
                    experts, rows, columns = shard
                    return shard_columns(
                        self._read_rows(name, experts.start, rows, read_stored), columns, self.tensors[name].place(name)
                    )
                experts, columns, rows = shard
                floats = self._floats
                parts = (
                    self._read_rows(name, expert, rows, read_stored).dequantize().to(floats)[:, columns].T
                    for expert in range(*experts.indices(self._weights[name][0]))
                )
                return torch.stack(list(parts))

            yield read

    def _read_rows(self, name: str, expert: int, rows: slice, read_stored: ReadPart) -> QuantizedWeight:
        of_expert = slice(expert, expert + 1)
        neighbours = slice(rows.start, rows.stop)
        blocks = read_stored(name + _BLOCKS, (of_expert, neighbours, ALL, ALL))
        exponents = read_stored(name + _SCALES, (of_expert, neighbours, ALL))
        assert isinstance(blocks, Tensor) and isinstance(exponents, Tensor), "safetensors are plain"
        exponents = exponents[0, :: rows.step]
        is_damaged = exponents > MOST_EXPONENT
        if bool(is_damaged.any()):
            row, group = is_damaged.nonzero()[0].tolist()
            place = f"expert {expert}, row {rows.start + row * (rows.step or 1)}, group {group}"
            scales = self._stored.tensors[name + _SCALES]
            raise CheckpointError(
                f"{scales.file}: {scales.stored_name} has the byte {int(exponents[row, group])} for {place}: the scale "
                f"is NaN (255) or above 2 ** {MOST_EXPONENT - 127}; the file is damaged, download it again"
            )
        return mxfp4_weight(unpack_nibbles(blocks[0, :: rows.step].flatten(1)), exponents)
