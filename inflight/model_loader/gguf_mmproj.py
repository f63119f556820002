"""`MmprojSource`: reads the tensors of an mmproj file under the names of a Hugging Face folder. `WithTower` joins it with the
source of the part for text.

Two tensors of the model are divided in such files: the convolution of Qwen's patches has a tensor for each frame, and the
projection to queries, keys and values may have three. The weight of the norm of Gemma 3 is stored with 1 added to it. Gemma 4
has a matrix for patches where the file has a convolution, and bounds of layers that are numbers and not vectors.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inflight.config.gguf_file import GgufFile, read_part
from inflight.config.gguf_mmproj import mmproj_fields, projector_of
from inflight.config.gguf_projectors import BOUNDS, deepstack_layers, vision_integer
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.gguf_blocks import unpack_blocks
from inflight.model_loader.packing import shard_columns
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource

_SOUNDS = ("a.", "mm.a.")  # what the names of tensors for sounds begin with
_LATER_FRAME = "v.patch_embd.weight.1"
_FIRST_FRAME = "v.patch_embd.weight"
_PARTS = ("attn.q", "attn.k", "attn.v")
_WHOLE = "attn.qkv"
_ONE_PLUS = "mm.soft_emb_norm.weight"
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True)
class _Place:
    """The tensors of the file that make one of the model, one behind the other along `dim`. With `is_new_dim`, each of them is
    one index of a dimension that the file does not have. `change`: what the file's tensor becomes, if it is a single one."""

    names: tuple[str, ...]
    dim: int = 0
    is_new_dim: bool = False
    change: Callable[[Tensor], Tensor] | None = None


class MmprojSource(WeightSource):
    """
    Raises:
        UnsupportedModelError: see `projector_of`.
        CheckpointError: see `WeightSource`.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_part(path)
        projector = projector_of(self._file)
        self._has_flat_patches = projector.has_flat_patches
        fields = mmproj_fields(self._file)
        deepstack = deepstack_layers(fields)
        is_swapped = _has_swapped_mlps(
            self._file, vision_integer(fields, "embedding_length"), vision_integer(fields, "feed_forward_length")
        )
        self._places: dict[str, _Place] = {}
        self.tensors = {}
        for stored_name in self._file.tensors:
            if stored_name.startswith(_SOUNDS) or stored_name == _LATER_FRAME:
                continue
            right_name = _with_right_mlp(stored_name) if is_swapped else stored_name
            self._add(projector.model_name(right_name, deepstack), self._place(stored_name))
        self._join_projections()

    def _place(self, stored_name: str) -> _Place:
        if stored_name == _FIRST_FRAME and _LATER_FRAME in self._file.tensors:
            return _Place((_FIRST_FRAME, _LATER_FRAME), 2, is_new_dim=True)
        if stored_name == _FIRST_FRAME and self._has_flat_patches:
            return _Place((stored_name,), change=_flat_patches)
        if stored_name.endswith(BOUNDS):
            return _Place((stored_name,), change=torch.squeeze)
        if stored_name == _ONE_PLUS:
            return _Place((stored_name,), change=lambda weight: weight - 1)
        return _Place((stored_name,))

    def _add(self, name: str, place: _Place) -> None:
        """Adds a tensor of the model. Those of which it is made have the same shape and type."""
        stored = [self._file.tensors[each] for each in place.names]
        shapes, kinds = {each.shape for each in stored}, {each.type.name for each in stored}
        if len(shapes) > 1 or len(kinds) > 1 or name in self.tensors:
            raise CheckpointError(
                f"{self._file.path}: {' and '.join(place.names)} make {name}, but it is there twice, or their shapes or types "
                "differ"
            )
        shape = list(stored[0].shape)
        if place.is_new_dim:
            shape.insert(place.dim, len(stored))
        else:
            shape[place.dim] *= len(stored)
        is_quantized = stored[0].type.is_quantized
        if is_quantized and (len(shape) != 2 or place.change is not None):
            raise CheckpointError(
                f"{self._file.path}: {place.names[0]} is {stored[0].type.name} and has {len(stored[0].shape)} dimensions; "
                "only matrices of layers can be quantized"
            )
        if place.change is not None:
            shape = list(place.change(torch.empty(shape, dtype=torch.float32, device="meta")).shape)
        self.tensors[name] = StoredTensor(
            self._file.path, place.names[0], tuple(shape), stored[0].type.name, is_quantized
        )
        self._places[name] = place

    def _join_projections(self) -> None:
        """Queries, keys and values of Qwen's towers are one tensor in the model."""
        wholes = {
            name.replace(f".{part}.", f".{_WHOLE}."): None
            for part in _PARTS
            for name in self.tensors
            if f".{part}." in name
        }
        for whole in wholes:
            names = [whole.replace(f".{_WHOLE}.", f".{part}.") for part in _PARTS]
            if any(each not in self.tensors for each in names):
                found = [self._places[each].names[0] for each in names if each in self.tensors]
                raise CheckpointError(
                    f"{self._file.path} has {' and '.join(found)}, but queries, keys and values of a layer must all be there; "
                    "download it again"
                )
            stored = tuple(self._places.pop(each).names[0] for each in names)
            for each in names:
                del self.tensors[each]
            self._add(whole, _Place(stored))

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        yield self._read

    def _read(self, name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
        place = self._places[name]
        if place.change is not None:
            return place.change(self._read_floats(place.names[0]))[shard]
        if len(self.tensors[name].shape) != 2:
            parts = [self._read_floats(each) for each in place.names]
            whole = torch.stack(parts, place.dim) if place.is_new_dim else torch.cat(parts, place.dim)
            return whole[shard]
        rows_of_part = self._file.tensors[place.names[0]].shape[0]
        start, stop, _ = shard[0].indices(self.tensors[name].shape[0])
        index, first = divmod(start, rows_of_part)
        assert stop - start + first <= rows_of_part, f"rows of several tensors of {name} are read at once"
        return shard_columns(self._unpack(place.names[index], first, stop - start), shard[1], name)

    def _read_floats(self, stored_name: str) -> Tensor:
        """A tensor that is no matrix, in its shape."""
        rows = self._unpack(stored_name)
        assert isinstance(rows, Tensor), "only matrices are quantized"
        return rows.reshape(self._file.tensors[stored_name].shape)

    def _unpack(self, stored_name: str, row: int = 0, num_rows: int | None = None) -> Tensor | QuantizedWeight:
        return unpack_blocks(self._file.tensors[stored_name].type, self._file.map_tensor(stored_name, row, num_rows))


class WithTower(WeightSource):
    """The tensors of two sources: of the part for text, and of the part that reads images."""

    def __init__(self, text: WeightSource, tower: WeightSource) -> None:
        self._text = text
        self._tower = tower
        self.tensors = {**text.tensors, **tower.tensors}
        self.unlisted = text.unlisted
        self.bits_in_memory = text.bits_in_memory
        self.notice = text.notice

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with ExitStack() as stack:
            text, tower = (stack.enter_context(each.open()) for each in (self._text, self._tower))

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                return (tower if name in self._tower.tensors else text)(name, shard)

            yield read


def _flat_patches(weight: Tensor) -> Tensor:
    """[out_features, num_channels, height, width] -> [out_features, height * width * num_channels]."""
    return weight.movedim(1, -1).flatten(1)


def _has_swapped_mlps(file: GgufFile, hidden_size: int, mlp_size: int) -> bool:
    """Whether the names of the two matrices of the MLPs are swapped, as in files of the first converters."""
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    return down is not None and hidden_size != mlp_size and down.shape == (mlp_size, hidden_size)


def _with_right_mlp(stored_name: str) -> str:
    return ".".join(_SWAPPED.get(part, part) for part in stored_name.split("."))
