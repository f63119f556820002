"""`StackedExperts`: shows tensors that have the weights of all experts of a layer as one weight for each expert and projection.

`FusedMoE` asks for `<layer>.mlp.experts.<expert>.<projection>.weight`, where the projection is gate_proj or up_proj, both
[size, hidden_size], or down_proj, [hidden_size, size]; and for `bias`, if the experts have biases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.weight_source import ReadPart, ShardSlices, WeightSource

_EXPERTS = ".mlp.experts."
_EITHER = "either."  # the shapes of two tensors say whether their rows are the usual ones
_ROWS = "rows"
_COLUMNS = "columns"


@dataclass(frozen=True)
class _Stack:
    """How a stacked tensor has the rows of its projections.

    `dimensions`: of the tensor, after the first one, which is that of the experts. If `alternates`, the rows of the projections
    alternate. Otherwise all rows of one projection come before those of the next one.
    """

    projections: tuple[str, ...]
    dimensions: tuple[str, ...] = (_ROWS, _COLUMNS)
    alternates: bool = False

    def __str__(self) -> str:
        return f"[experts, {', '.join(self.dimensions)}], with the rows of {' and '.join(self.projections)}"

    def places(self, num_rows: int) -> list[range]:
        """Returns for each projection the indices of its rows, in a tensor with `num_rows` rows for each expert."""
        num_projections = len(self.projections)
        if self.alternates:
            return [range(index, num_rows, num_projections) for index in range(num_projections)]
        size = num_rows // num_projections
        return [range(index * size, (index + 1) * size) for index in range(num_projections)]


_GATE_UP = ("gate_proj", "up_proj")
_DOWN = ("down_proj",)
_STACKS = {  # by the name behind `_EXPERTS`
    "gate_up_proj": _Stack(_GATE_UP),
    "down_proj": _Stack(_DOWN),
    "down_proj_bias": _Stack(_DOWN, (_ROWS,)),
    **{name: _Stack((name,)) for name in _GATE_UP},  # in GGUF files
    **{f"{name}_bias": _Stack((name,), (_ROWS,)) for name in _GATE_UP},
    "columns.gate_up_proj": _Stack(_GATE_UP, (_COLUMNS, _ROWS)),
    "columns.down_proj": _Stack(_DOWN, (_COLUMNS, _ROWS)),
    "alternating.gate_up_proj": _Stack(_GATE_UP, alternates=True),
    "alternating.down_proj": _Stack(_DOWN),
    "transposed.gate_up_proj": _Stack(_GATE_UP, (_COLUMNS, _ROWS), alternates=True),
    "transposed.gate_up_proj_bias": _Stack(_GATE_UP, (_ROWS,), alternates=True),
    "transposed.down_proj": _Stack(_DOWN, (_COLUMNS, _ROWS)),
    "transposed.down_proj_bias": _Stack(_DOWN, (_ROWS,)),
}


@dataclass(frozen=True)
class _Place:
    """Where the weight or bias of an expert is: in the tensor `name`, at these rows."""

    name: str
    stack: _Stack
    expert: int
    rows: range


class StackedExperts(WeightSource):
    """The weights of `stored`, with each stacked tensor divided into the weights of its experts. Of a quantized one, `stored`
    reads parts of one expert, [rows, columns], whose rows may have a step.

    Raises:
        CheckpointError: a stacked tensor has another number of dimensions than it should have, or its rows cannot be divided
            among the projections.
    """

    def __init__(self, stored: WeightSource) -> None:
        self._stored = stored
        self._places: dict[str, _Place] = {}
        self.tensors = dict(stored.tensors)
        self.notice = stored.notice
        self.bits_in_memory = stored.bits_in_memory
        self.name_in_file = stored.name_in_file
        unlisted = set(stored.unlisted)
        for name in stored.tensors:
            layer, _, stacked = name.partition(_EXPERTS)
            stack = self._stack_of(name, stacked)
            if stack is not None:
                parts = self._divide(name, f"{layer}{_EXPERTS}", stack)
                unlisted |= set(parts) if name in stored.unlisted else set()
        self.unlisted = unlisted & self.tensors.keys()

    def _stack_of(self, name: str, stacked: str) -> _Stack | None:
        """How the tensor `name` has its rows. `stacked`: its name behind `_EXPERTS`. None: it is the weight of one expert."""
        if not stacked.startswith(_EITHER):
            return _STACKS.get(stacked)
        layer = name.removesuffix(stacked)
        both = [self._stored.tensors.get(f"{layer}{_EITHER}{each}") for each in ("gate_up_proj", "down_proj")]
        shapes = [tensor.shape for tensor in both if tensor is not None and len(tensor.shape) == 3]
        # with the usual rows: [experts, 2 * size, hidden_size] and [experts, hidden_size, size]
        has_usual_rows = len(shapes) == 2 and shapes[0][1] == 2 * shapes[1][2]
        plain = stacked.removeprefix(_EITHER)
        return _STACKS.get(plain if has_usual_rows else f"columns.{plain}")

    def _divide(self, name: str, prefix: str, stack: _Stack) -> list[str]:
        """Replaces a stacked tensor by the weights or biases in it. Returns their names."""
        tensor = self.tensors.pop(name)
        sizes = dict(zip(stack.dimensions, tensor.shape[1:], strict=False))
        if len(tensor.shape) != 1 + len(stack.dimensions) or sizes[_ROWS] % len(stack.projections):
            raise CheckpointError(f"{tensor.place(name)} has shape {list(tensor.shape)}; it should be {stack}")
        columns = (sizes[_COLUMNS],) if _COLUMNS in sizes else ()
        if tensor.is_quantized and not columns:
            raise CheckpointError(f"{tensor.place(name)} is {tensor.dtype}; biases should be floats")
        kind = "weight" if columns else "bias"
        places = stack.places(sizes[_ROWS])
        found = []
        for expert in range(tensor.shape[0]):
            for projection, rows in zip(stack.projections, places, strict=True):
                weight = f"{prefix}{expert}.{projection}.{kind}"
                if weight in self.tensors:
                    other = self.tensors[weight]
                    raise CheckpointError(
                        f"{weight} of the model is there twice: {tensor.stored_name} in {tensor.file}, and "
                        f"{other.stored_name} in {other.file}; remove one"
                    )
                self.tensors[weight] = replace(tensor, shape=(len(rows), *columns))
                self._places[weight] = _Place(name, stack, expert, rows)
                found.append(weight)
        return found

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with self._stored.open() as read_stored:

            def read(name: str, shard: ShardSlices) -> Tensor | QuantizedWeight:
                place = self._places.get(name)
                if place is None:
                    return read_stored(name, shard)
                rows = place.rows[shard[0]]
                is_quantized = self.tensors[name].is_quantized
                step = rows.step if is_quantized else 1  # safetensors cannot be read with a step
                held = {_ROWS: slice(rows[0], rows[-1] + 1, step), _COLUMNS: shard[-1]}
                dimensions = place.stack.dimensions
                expert = slice(place.expert, place.expert + 1)
                part = read_stored(place.name, (expert, *(held[each] for each in dimensions)))
                if isinstance(part, QuantizedWeight):  # of this expert
                    return part
                return part[0].movedim(dimensions.index(_ROWS), 0)[:: rows.step]

            yield read
