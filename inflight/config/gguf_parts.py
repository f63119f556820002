"""`read_gguf`: reads the headers of a GGUF file and, if its model is split over several files, of all its parts.

The parts are called NAME-00001-of-00003.gguf and so on, as by llama.cpp's llama-gguf-split. Each is a GGUF file with
these keys. The first has the metadata of the model, too:

    split.no               the number of the part, from 0
    split.count            how many parts there are
    split.tensors.count    how many tensors all parts have together
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from inflight.config.gguf_file import GgufFile, GgufTensor, read_part
from inflight.errors import CheckpointError
from inflight.hub import gguf_parts

_KEYS = ("split.no", "split.count", "split.tensors.count")


def read_gguf(path: Path) -> GgufFile:
    """`path`: the only file of a model, or the first of its parts.

    Raises:
        CheckpointError: as `read_part`, for any part. A part is missing, or belongs to another model.
        ConfigError: the package `gguf` is not installed.
    """
    first = read_part(path)
    number = _integer(first, "split.no", 0)
    count = _integer(first, "split.count", 1)
    if count <= 1:
        return first
    paths = gguf_parts(path)
    if number != 0 and len(paths) == count and path != paths[0]:
        what_to_do = "give" if paths[0].is_file() else "download the missing files and give"
        raise CheckpointError(
            f"{path} is part {number + 1} of {count} of a model; {what_to_do} the first part, {paths[0]}"
        )
    if len(paths) != count or paths[0] != path or number != 0:
        raise CheckpointError(
            f"{path} is part {number + 1} of {count} of a model, but is not called so: parts are found by their names, "
            f"NAME-00001-of-{count:05}.gguf and so on; give the file its name back"
        )
    tensors: dict[str, GgufTensor] = {}
    for index, part_path in enumerate(paths):
        part = first if index == 0 else _read_later_part(first, part_path, index)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: {name} is both in {tensors[name].path} and in {part_path}; one of them is a part of another model"
                )
            tensors[name] = tensor
    total = _integer(first, "split.tensors.count", len(tensors))
    if len(tensors) != total:
        raise CheckpointError(
            f"{path}: its {count} parts should have {total} tensors, but have {len(tensors)}: a part belongs to another model; "
            "download all parts again"
        )
    return replace(first, tensors=tensors)


def _read_later_part(first: GgufFile, path: Path, index: int) -> GgufFile:
    count = _integer(first, "split.count", 1)
    if not path.is_file():
        raise CheckpointError(
            f"{first.path} is the first of {count} parts of a model, but {path} is missing; download it"
        )
    part = read_part(path)
    wanted = {"split.no": index} | {key: _integer(first, key, 0) for key in _KEYS[1:] if key in first.metadata}
    found = {key: part.metadata.get(key) for key in wanted}
    if any(not isinstance(found[key], int) or found[key] != wanted[key] for key in wanted):
        raise CheckpointError(
            f"{path} is not part {index + 1} of the model of {first.path}: it has {_listed(found)}, and should have "
            f"{_listed(wanted)}; download it again"
        )
    return part


def _integer(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{file.path}: {key}={value!r} is no number of parts or tensors; download it again")
    return value


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())
