"""`StackedExperts`: shows tensors that have the weights of all experts of a layer as one weight for each expert and projection.

`FusedMoE` asks for `<layer>.mlp.experts.<expert>.<projection>.weight`, where the projection is gate_proj or up_proj, both
[size, hidden_size], or down_proj, [hidden_size, size].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource

_EXPERTS = ".mlp.experts."
# the name of a stacked tensor behind `_EXPERTS` -> the projections whose rows it has, one behind the other
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class _Place:
    """Where the weight of an expert is: in `stacked`, with the rows [first_row, first_row + num_rows)."""

    stacked: str
    expert: int
    first_row: int


class StackedExperts(WeightSource):
    """The weights of `stored`, in which the stacked tensors are divided. They are [num_experts, rows, columns]. `gate_up_proj`
    has the rows of gate and then those of up.

    Raises:
        CheckpointError: a stacked tensor has no three dimensions, or its rows cannot be divided among the projections.
    """

    def __init__(self, stored: WeightSource) -> None:
        self._stored = stored
        self._places: dict[str, _Place] = {}
        self.tensors = dict(stored.tensors)
        unlisted = set(stored.unlisted)
        for name in stored.tensors:
            layer, _, stacked = name.partition(_EXPERTS)
            if stacked in _STACKED:
                parts = self._divide(name, f"{layer}{_EXPERTS}", _STACKED[stacked])
                unlisted |= set(parts) if name in stored.unlisted else set()
        self.unlisted = unlisted & self.tensors.keys()

    def _divide(self, name: str, prefix: str, projections: tuple[str, ...]) -> list[str]:
        """Replaces a stacked tensor by the weights in it. Returns their names."""
        tensor = self.tensors.pop(name)
        if len(tensor.shape) != 3 or tensor.shape[1] % len(projections):
            raise CheckpointError(
                f"{name} in {tensor.file} has shape {list(tensor.shape)}; it should be [experts, rows, columns], with the rows "
                f"of {' and '.join(projections)}"
            )
        num_experts, num_rows, num_columns = tensor.shape
        size = num_rows // len(projections)
        found = []
        for expert in range(num_experts):
            for index, projection in enumerate(projections):
                weight = f"{prefix}{expert}.{projection}.weight"
                if weight in self.tensors:
                    raise CheckpointError(f"{weight} is both in {name} and a tensor of its own in {tensor.file}")
                self.tensors[weight] = StoredTensor(tensor.file, (size, num_columns), tensor.dtype)
                self._places[weight] = _Place(name, expert, index * size)
                found.append(weight)
        return found

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with self._stored.open() as read_stored:

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                place = self._places.get(name)
                if place is None:
                    return read_stored(name, shard)
                rows, columns = shard
                rows = slice(place.first_row + rows.start, place.first_row + rows.stop)
                part = read_stored(place.stacked, (slice(place.expert, place.expert + 1), rows, columns))
                assert isinstance(part, Tensor), "stacked weights are plain"
                return part[0]

            yield read
