"""`Checkpoint`: a folder's safetensors files as one source of weights. The files are open only while a block is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.model_loader.weight_source import Held, ReadPart, StoredTensor, WeightSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OF_TEXT = {"model.language_model.": "model.", "language_model.": ""}


@contextmanager
def open_file(file: Path) -> Iterator[Any]:  # Any: safetensors has no types
    """Maps a safetensors file. At the end of the `with` block it is unmapped, so that its pages do not stay in the process.

    Raises:
        CheckpointError: the file cannot be opened, or reading it fails inside the block.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: truncated, corrupt or unreadable as safetensors ({error}); download it again"
        ) from error


class Checkpoint(WeightSource):
    """The tensors of a model folder, as they are stored.

    In a model that also reads images, the part for text has names that begin with one of `_OF_TEXT`. They get the names that
    they have in a model for text alone, unless `keeps_names` is set. `renames`: see `ModelArchitecture`.

    The file is `model.safetensors`. If it does not exist, `model.safetensors.index.json` lists the files. If there is no index
    either, the files are all `*.safetensors`.

    Raises:
        CheckpointError: there are no weights, a file is missing or corrupt, the index contradicts the files, or a tensor is in
            two files.
    """

    def __init__(self, folder: Path, *, keeps_names: bool = False, renames: Sequence[tuple[str, str]] = ()) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._stored_names: dict[str, str] = {}  # of tensors that got other names
        self._prefixes, self._renames = {} if keeps_names else _OF_TEXT, renames
        weight_map: dict[str, str] = {}
        if (folder / SINGLE_FILE).is_file():
            files = [folder / SINGLE_FILE]
        elif (folder / INDEX_FILE).is_file():
            weight_map = _read_index(folder / INDEX_FILE)
            files = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(
                    f"{folder} has no *.safetensors, and no GGUF file; other formats are not read: save the weights as "
                    "safetensors"
                )
        for file in files:
            self._add_file(file)
        for name, file_name in weight_map.items():
            stored = self.tensors.get(self._name_of(name))
            if stored is None or stored.file.name != file_name:
                raise CheckpointError(f"{folder / INDEX_FILE} says that {name} is in {file_name}, but it is not there")

    @contextmanager
    def open(self) -> Iterator[ReadPart]:
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}  # Any: safetensors has no types

            def read(name: str, held: Held) -> Tensor:
                file = self.tensors[name].file
                if file not in opened:
                    opened[file] = stack.enter_context(open_file(file))
                part: Tensor = opened[file].get_slice(self._stored_names.get(name, name))[held]
                return part

            yield read

    def _add_file(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {INDEX_FILE} names it; download it again")
        with open_file(file) as opened:
            names: list[str] = opened.keys()
            for stored_name in names:
                name = self._name_of(stored_name)
                if name in self.tensors:
                    raise CheckpointError(f"{name} is both in {self.tensors[name].file} and in {file}; remove one")
                if name != stored_name:
                    self._stored_names[name] = stored_name
                header = opened.get_slice(stored_name)
                self.tensors[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())

    def _name_of(self, stored_name: str) -> str:
        name = stored_name
        for prefix, other in self._prefixes.items():
            if stored_name.startswith(prefix):
                name = other + stored_name.removeprefix(prefix)
                break
        for part, other in self._renames:
            name = name.replace(part, other)
        return name


def _read_index(file: Path) -> dict[str, str]:
    """Reads the index. Returns tensor name -> file name."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no index of safetensors files ({error!r}); download it again") from error
    for name, file_name in entries.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{file}: {name} is in {file_name!r}, which is not a file of this folder")
    return entries
