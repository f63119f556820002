"""`Checkpoint`: a folder's safetensors files as one source of weights. The files are open only while a block is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.config.safetensors_file import INDEX_FILE, check_files_exist, find_files, model_name
from inflight.errors import CheckpointError
from inflight.model_loader.stored_names import NamesInFiles
from inflight.model_loader.weight_source import ReadPart, ShardSlices, StoredTensor, WeightSource


@contextmanager
def open_file(file: Path) -> Iterator[Any]:  # Any: safetensors has no types
    """Maps a safetensors file. At the end of the `with` block it is unmapped, so that its pages do not stay in the process.

    Raises:
        CheckpointError: the file cannot be opened, or reading it fails inside the block.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "mmap" not in str(error):  # torch says so if the file cannot be mapped
            raise
        raise CheckpointError(
            f"{file}: truncated, corrupt or unreadable as safetensors ({error}); download it again"
        ) from error


class Checkpoint(WeightSource):
    """The tensors of a model folder, as they are stored.

    They have the names that Inflight's own code gives them (`model_name`), unless `keeps_names` is set. `renames`: see
    `ModelArchitecture`. `find_files` says which files are read.

    Raises:
        CheckpointError: there are no weights, a file is missing or corrupt, the index contradicts the files, or a tensor is in
            two files.
    """

    def __init__(self, folder: Path, *, keeps_names: bool = False, renames: Sequence[tuple[str, str]] = ()) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._keeps_names = keeps_names
        self._renames = renames
        check_files_exist(folder)
        files, weight_map = find_files(folder)
        for file in files:
            self._add_file(file)
        for name, file_name in weight_map.items():
            stored = self.tensors.get(self._name_of(name))
            if stored is None or stored.file.name != file_name:
                raise CheckpointError(f"{folder / INDEX_FILE} says that {name} is in {file_name}, but it is not there")

        listed = set(map(self._name_of, weight_map)) or self.tensors.keys()
        self.unlisted = self.tensors.keys() - listed
        if not keeps_names:
            stored_names = [tensor.stored_name for tensor in self.tensors.values()]
            self.name_in_file = NamesInFiles(stored_names, renames).find

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}  # Any: safetensors has no types

            def read(name: str, shard: ShardSlices) -> Tensor:
                stored = self.tensors[name]
                if stored.file not in opened:
                    opened[stored.file] = stack.enter_context(open_file(stored.file))
                part: Tensor = opened[stored.file].get_slice(stored.stored_name)[shard]
                return part

            yield read

    def _add_file(self, file: Path) -> None:
        with open_file(file) as opened:
            names: list[str] = opened.keys()
            for stored_name in names:
                name = self._name_of(stored_name)
                if name in self.tensors:
                    other = self.tensors[name]
                    raise CheckpointError(
                        f"{stored_name} in {file} and {other.stored_name} in {other.file} are the same tensor of the model; "
                        "remove one"
                    )
                header = opened.get_slice(stored_name)
                self.tensors[name] = StoredTensor(file, stored_name, tuple(header.get_shape()), header.get_dtype())

    def _name_of(self, stored_name: str) -> str:
        if self._keeps_names:
            return stored_name
        return model_name(stored_name, self._renames)
