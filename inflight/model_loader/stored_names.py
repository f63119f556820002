"""The names that tensors have in the files of a checkpoint, for messages: of tensors that are missing, too."""

import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inflight.config.safetensors_file import stored_names_of
from inflight.model_loader.weight_source import WeightSource

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert


class NamesInFiles:
    """Finds what a tensor of the model would be called in safetensors files. `stored_names`: the tensors that are there.
    `renames`: see `ModelArchitecture`."""

    def __init__(self, stored_names: Iterable[str], renames: Sequence[tuple[str, str]]) -> None:
        self._sorted = sorted(stored_names)
        self._renames = renames

    def find(self, name: str) -> str:
        """Of the names that become `name`, the one that has the longest beginning in common with a tensor that is there."""
        return max(stored_names_of(name, self._renames), key=self._common)

    def _common(self, candidate: str) -> int:
        index = bisect(self._sorted, candidate)
        neighbours = self._sorted[max(0, index - 1) : index + 1]
        return max((_num_equal(candidate, each) for each in neighbours), default=0)


def _num_equal(one: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


@dataclass(frozen=True)
class _Relative:
    """A tensor that is there, and differs from others only in the numbers of its layer and expert."""

    numbers: list[str]
    stored_name: str

    def name_with(self, numbers: list[str]) -> str | None:
        """The name in the file of the tensor with these numbers; None if this name does not have the numbers of the model."""
        stored = _NUMBER.findall(self.stored_name)
        if not stored or stored != self.numbers[: len(stored)]:
            return None
        following = iter(numbers)
        return _NUMBER.sub(lambda _: next(following), self.stored_name)


class MissingNames:
    """Names in the files of tensors that `source` lacks. They are made from the names of the same tensors of other experts and
    layers, which know best how the files divide or join weights."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._in_layer: dict[tuple[str, str], _Relative] = {}
        self._anywhere: dict[str, _Relative] = {}
        for name, tensor in source.tensors.items():
            pattern = _NUMBER.sub("#", name)
            numbers = _NUMBER.findall(name)
            if numbers:
                relative = _Relative(numbers, tensor.stored_name)
                self._in_layer.setdefault((pattern, numbers[0]), relative)
                self._anywhere.setdefault(pattern, relative)

    def find(self, name: str) -> str:
        pattern = _NUMBER.sub("#", name)
        numbers = _NUMBER.findall(name)
        layer = numbers[0] if numbers else ""
        relative = self._in_layer.get((pattern, layer)) or self._anywhere.get(pattern)
        found = relative.name_with(numbers) if relative else None
        return found or self._source.name_in_file(name)
