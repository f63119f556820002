"""What the headers of a folder's safetensors say: which tensors there are, and where their bytes are. Imports no torch.

https://huggingface.co/docs/safetensors describes the format: 8 bytes with the size of the header, the header as JSON, the data.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError
from inflight.model_advice import unfinished_download

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# In models that also read images, names begin with one of these, or with what takes its place here. The names of the part for
# text become those of a model for text alone.
_WITH_IMAGES = {"model.language_model.": "model.", "language_model.": "", "model.text_model.": "model."} | {
    name: f"model.{name}" for name in ("visual.", "vision_tower.", "multi_modal_projector.")
}
# A decoder that was saved without its head has names without this prefix.
_PREFIX = "model."
_IN_DECODER = ("embed_tokens.", "layers.", "norm.", "embedding_norm.")
_LARGEST_HEADER = 100_000_000  # bytes; the format allows no more
_COMPARED_AT_ONCE = 2**22  # bytes
_BITS = {  # of a number of each dtype of the format
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class StoredBytes:
    """A tensor's dtype and shape, and its bytes `[start, stop)` in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files with weights, and tensor name -> file name as the index says ({} if there is no index).

    The file is `model.safetensors`. If it does not exist, `model.safetensors.index.json` lists the files. If there is no index
    either, the files are all `*.safetensors`.

    Raises:
        CheckpointError: there are no weights, or the index cannot be read.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], {}
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_index(folder / INDEX_FILE)
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        problem = unfinished_download(folder) or "; other formats are not read: save the weights as safetensors"
        raise CheckpointError(f"{folder} has no *.safetensors, and no GGUF file{problem}")
    return files, {}


def check_files_exist(folder: Path, *, all_of_index: bool = False) -> None:
    """
    Args:
        all_of_index: also look for the files of the index if `model.safetensors` exists, which is then the only file that is
            read.

    Raises:
        CheckpointError: there are no weights, or a file is missing that the index names.
    """
    files, _ = find_files(folder)
    if all_of_index and (folder / INDEX_FILE).is_file():
        with suppress(CheckpointError):  # an index that cannot be read does not matter beside `model.safetensors`
            files = [folder / name for name in sorted(set(_read_index(folder / INDEX_FILE).values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(files)} weight files that {INDEX_FILE} names are missing, for example "
            f"{missing[0]}{unfinished_download(folder) or ': download them again'}"
        )


def check_headers(folder: Path) -> None:
    """Check the headers of those weight files that are there, and whether they have the tensors that the index names.

    Raises:
        CheckpointError: a header is damaged, the index contradicts it, or a tensor is in two files.
    """
    files, weight_map = find_files(folder)
    found = dict[str, str]()  # tensor -> name of its file
    headers = {file: read_header(file) for file in files if file.is_file()}
    for file, header in headers.items():
        for name in header:
            if name in found:
                raise CheckpointError(f"{folder}: {name} is both in {found[name]} and in {file.name}; remove one")
            found[name] = file.name
    for name, file_name in weight_map.items():
        if folder / file_name in headers and found.get(name) != file_name:
            raise CheckpointError(
                f"{folder / INDEX_FILE} says that {name} is in {file_name}, but it is not there; download both again"
            )


def digests(files: Sequence[Path]) -> dict[str, str]:
    """Returns "SHA-256 of NAME" -> this digest, for each file. One core needs some seconds for a GB."""

    def digest(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return dict(zip((f"SHA-256 of {file.name}" for file in files), threads.map(digest, files), strict=True))


def _read_index(file: Path) -> dict[str, str]:
    """Reads the index. Returns tensor name -> file name."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is no index of safetensors files ({error!r}); download it again") from error
    for name, file_name in entries.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{file}: {name} is in {file_name!r}, which is not a file of this folder")
    return entries


def model_name(stored_name: str, renames: Sequence[tuple[str, str]]) -> str:
    """The name that a tensor has in Inflight's own code. `renames`: see `ModelArchitecture`.

    In a model that also reads images, the names of the part for text become those of a model for text alone, and older names of
    the other parts the newer ones. Names of a decoder without the prefix "model." get it.
    """
    name = stored_name
    for prefix, other in _WITH_IMAGES.items():
        if stored_name.startswith(prefix):
            name = other + stored_name.removeprefix(prefix)
            break
    if name.startswith(_IN_DECODER):
        name = _PREFIX + name
    for part, other in renames:
        name = name.replace(part, other)
    return name


def stored_names_of(name: str, renames: Sequence[tuple[str, str]]) -> set[str]:
    """The names that `model_name` makes `name` of: what the files may call a tensor of the model."""
    names = {name}
    for part, other in reversed(renames):
        if other:
            names |= {each.replace(other, part) for each in names}
    for prefix, other in _WITH_IMAGES.items():
        names |= {prefix + each.removeprefix(other) for each in names if each.startswith(other)}
    names |= {each.removeprefix(_PREFIX) for each in names}
    return {each for each in names if model_name(each, renames) == name} or {name}


def read_header(file: Path) -> dict[str, StoredBytes]:
    """
    Raises:
        CheckpointError: the file cannot be read, or is no whole safetensors file: each byte of the data must belong to one
            tensor, and the shape and the dtype of a tensor must agree with its bytes.
    """
    try:
        if not file.is_file():  # a pipe, for example, would be waited for
            raise ValueError("it is not a file")
        with file.open("rb") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            size = int.from_bytes(opened.read(8), "little")
            if size > min(_LARGEST_HEADER, num_bytes - 8):
                raise ValueError(f"its header would have {size} bytes, and the file has {num_bytes}")
            entries = json.loads(opened.read(size))
        tensors = {
            str(name): _stored(file, str(name), entry, 8 + size, num_bytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        _check_extents(tensors, 8 + size, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}); download it again") from error
    return tensors


def _check_extents(tensors: Mapping[str, StoredBytes], data: int, num_bytes: int) -> None:
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            what = "overlap those of another tensor" if tensor.start < end else "leave a gap before them"
            raise ValueError(f"the bytes {tensor.start - data} to {tensor.stop - data} of {name} {what}")
        end = tensor.stop
        if tensor.dtype not in _BITS:
            raise ValueError(f"{name} has the dtype {tensor.dtype!r:.40}, which the format does not have")
        if math.prod(tensor.shape) * _BITS[tensor.dtype] != 8 * (tensor.stop - tensor.start):
            raise ValueError(
                f"{name} has {tensor.stop - tensor.start} bytes, but not its shape {tensor.shape!r:.100} in {tensor.dtype}"
            )
    if end != num_bytes:
        raise ValueError(f"its tensors end at byte {end}, and the file has {num_bytes}")


def _stored(file: Path, name: str, entry: Mapping[str, Any], data: int, num_bytes: int) -> StoredBytes:  # Any: JSON
    """The entry of one tensor. `data`: where the data begin in the file, which has `num_bytes`."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
        raise ValueError(f"{name} has the shape {shape!r:.100} and the bytes {first!r:.40} to {last!r:.40}")
    if not first <= last <= num_bytes - data:
        raise ValueError(f"{name} should be in the bytes {first} to {last} of the data, which have {num_bytes - data}")
    return StoredBytes(file, str(entry["dtype"]), shape, data + first, data + last)


def have_same_bytes(one: StoredBytes, other: StoredBytes) -> bool:
    """Whether two tensors have the same dtype, shape and bytes. The comparison ends at the first bytes that differ.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (one.dtype, one.shape, one.stop - one.start) != (other.dtype, other.shape, other.stop - other.start):
        return False
    try:
        with one.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(one.start)
            second.seek(other.start)
            left = one.stop - one.start
            while left > 0:
                size = min(left, _COMPARED_AT_ONCE)
                read = first.read(size)
                if len(read) < size or read != second.read(size):  # also if a file has become shorter
                    return False
                left -= size
    except OSError as error:
        raise CheckpointError(f"{one.file} or {other.file} cannot be read: {error}") from error
    return True
