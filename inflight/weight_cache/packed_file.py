"""The two files of an entry: written by `write_packed`, checked and mapped by `open_packed`.

The weights of a model are a sequence of bytes, in which each tensor begins at a multiple of `_ALIGNMENT`. Everything else is in
the index: the tensors and the products of each unit, in the order in which the loader makes them.
"""

import ctypes
import hashlib
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from inflight.weight_cache.folder import INDEX, PARTIAL, WEIGHTS, CacheFolder
from inflight.weight_cache.identity import FileIdentity, identity_of, sample_places

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_AT_ONCE = _HUGE_PAGE  # aligned writes of this size become huge pages in the cache of files
_NUM_SAMPLES = 256
_DIGEST_BYTES = 32
_SPARE_SHARE = 0.05  # this part of the disk stays free


def has_codec() -> bool:
    """Whether the package that writes and reads the index is installed. An engine without other processes does not need it."""
    return find_spec("msgspec") is not None


class PackedFileError(Exception):
    """An entry cannot be used; the message says why."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is: its first byte, its dtype as torch names it, and its shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredProduct:
    """A `PackedLinear`. `fields`: those of its `LinearWeight` that are numbers, in their order."""

    packed: StoredTensor
    bias: StoredTensor | None
    dtype: str
    fields: tuple[int | float, ...]
    table: tuple[int, ...]


@dataclass(frozen=True)
class StoredUnit:
    """A unit of the model (`CausalLM.load_units`): the parameters that it keeps, as they were filled, and what its linear
    method has made of its weights, call by call. Several products of one call are the heads of `prepare_heads`."""

    prefix: str
    parameters: tuple[tuple[str, StoredTensor], ...]
    calls: tuple[tuple[StoredProduct, ...], ...]


@dataclass(frozen=True)
class Index:
    """`samples`: CRC-32 of the places of `sample_places`. `notes`: the messages of the loader about the weights."""

    weights: FileIdentity
    samples: tuple[int, ...]
    units: tuple[StoredUnit, ...]
    notes: tuple[str, ...]


class Layout:
    """Gives each tensor of a packed file its place."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.tensors: list[tuple[int, Tensor]] = []

    def add(self, tensor: Tensor) -> StoredTensor:
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset + tensor.numel() * tensor.itemsize
        self.tensors.append((offset, tensor))
        return StoredTensor(offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def write_packed(
    folder: CacheFolder,
    key: str,
    layout: Layout,
    make_index: Callable[[FileIdentity, tuple[int, ...]], Index],
    *,
    limit_bytes: int,
    is_stopped: Callable[[], bool],
) -> bool:
    """Writes an entry. The files get their names only when they are complete and on the disk. Returns whether this was done. It
    is not done if another process is writing the same entry, or if `is_stopped` returns True.

    Raises:
        OSError: the disk is full or read-only, or fails.
        PackedFileError: the entry is larger than the limit, or than the free space of the disk.
    """
    num_bytes = -(-layout.num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    if num_bytes > limit_bytes:
        raise PackedFileError(f"it needs {num_bytes / 1e9:.1f} GB, and weight_cache_gb allows {limit_bytes / 1e9:.1f}")
    folder.make_room(num_bytes, limit_bytes)
    disk = shutil.disk_usage(folder.path)
    spare = _SPARE_SHARE * (disk.used + disk.free)  # without what is reserved for other users
    if num_bytes > disk.free - spare:
        raise PackedFileError(
            f"it needs {num_bytes / 1e9:.1f} GB, and {disk.free / 1e9:.1f} GB of the disk are free, of which "
            f"{spare / 1e9:.1f} GB are left for others"
        )
    import msgspec  # optional at run time: `has_codec`

    with folder.partial(key) as opened:
        if opened is None or not _write(opened, layout, num_bytes, is_stopped):
            return False
        os.fsync(opened)
        samples = _read_samples(opened, num_bytes)
        os.replace(folder.file(key, PARTIAL), folder.file(key, WEIGHTS))
        # renaming changes the time of the inode
        content = msgspec.msgpack.encode(make_index(identity_of(os.fstat(opened)), samples))
        _write_index(folder, key, content)
    return True


def _write(opened: int, layout: Layout, num_bytes: int, is_stopped: Callable[[], bool]) -> bool:
    """Writes in the order of the file, `_AT_ONCE` bytes at a time."""
    buffer = bytearray(_AT_ONCE)
    start = 0  # of the buffer in the file
    for offset, tensor in layout.tensors:
        source = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        done = 0
        while done < len(source):
            while offset + done >= start + _AT_ONCE:
                if is_stopped():
                    return False
                start += _put(opened, buffer, start)
                buffer = bytearray(_AT_ONCE)
            at = offset + done - start
            num_copied = min(len(source) - done, _AT_ONCE - at)
            buffer[at : at + num_copied] = source[done : done + num_copied]
            done += num_copied
    while start < num_bytes:
        start += _put(opened, buffer, start)
        buffer = bytearray(_AT_ONCE)
    return True


def _put(opened: int, buffer: bytearray, start: int) -> int:
    done = 0
    while done < len(buffer):
        done += os.pwrite(opened, memoryview(buffer)[done:], start + done)
    return done


def _write_index(folder: CacheFolder, key: str, content: bytes) -> None:
    path = folder.file(key, INDEX)
    temporary = path.with_suffix(f".{os.getpid()}{PARTIAL}")
    opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(opened, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _read_samples(opened: int, num_bytes: int) -> tuple[int, ...]:
    places = sample_places(num_bytes, _NUM_SAMPLES)
    return tuple(zlib.crc32(os.pread(opened, size, offset)) for offset, size in places)


class PackedFile:
    """A mapped entry. The mapping exists until the last tensor in it is deleted.

    All processes share its pages. A page that one of them changes becomes its own copy; the file stays as it is.
    """

    def __init__(self, index: Index, content: Tensor) -> None:
        self.index = index
        self.content = content

    def tensor(self, stored: StoredTensor) -> Tensor:
        """
        Raises:
            PackedFileError: the place is not in the file.
        """
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise PackedFileError(f"it has a tensor of {stored.dtype}")
        count = 1
        for size in stored.shape:
            count *= size
        stop = stored.offset + count * dtype.itemsize
        if stored.offset < 0 or stored.offset % _ALIGNMENT or count < 0 or stop > len(self.content):
            raise PackedFileError("it has a tensor that is not within the file")
        return self.content[stored.offset : stop].view(dtype).view(stored.shape)


def open_packed(folder: CacheFolder, key: str) -> PackedFile | None:
    """Checks an entry and maps it. Returns None if there is none.

    Raises:
        PackedFileError: it is damaged, or was changed after it was written.
    """
    opened = folder.open(key, INDEX)
    if opened is None:
        return None
    with open(opened, "rb") as file:
        index = _read_index(file.read())
    opened = folder.open(key, WEIGHTS)
    if opened is None:
        raise PackedFileError("its weights are missing, or other users may have written to them")
    try:
        identity = identity_of(os.fstat(opened))
        if identity != index.weights:
            raise PackedFileError("its weights were changed, cut off or copied after they had been written")
        if _read_samples(opened, identity.num_bytes) != index.samples:
            raise PackedFileError("its weights are damaged")
        content = map_file(opened, identity.num_bytes)
    except OSError as error:
        raise PackedFileError(str(error)) from error
    finally:
        os.close(opened)
    folder.touch(key)
    return PackedFile(index, content)


def _read_index(stored: bytes) -> Index:
    import msgspec  # optional at run time: `has_codec`

    content, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise PackedFileError("its index is damaged")
    try:
        return msgspec.msgpack.decode(content, type=Index)
    except msgspec.DecodeError as error:
        raise PackedFileError(f"its index cannot be decoded ({error})") from error


def map_file(opened: int, num_bytes: int) -> Tensor:
    """The file as a tensor, uint8 [num_bytes], at a multiple of the size of a huge page, so that its pages can be huge.

    Raises:
        OSError: the operating system refuses.
    """
    reserved = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(reserved, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE_PAGE
    content = whole[first : first + num_bytes]
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address = content.data_ptr()
    flags = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED: in place of the reserved pages
    if library.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, opened, 0) != address:
        raise OSError(ctypes.get_errno(), f"its weights cannot be mapped ({os.strerror(ctypes.get_errno())})")
    library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)
    return content


def stored_bytes(units: Sequence[StoredUnit]) -> int:
    """The bytes of all tensors of these units."""
    tensors = [tensor for unit in units for _, tensor in unit.parameters]
    for unit in units:
        for product in (each for call in unit.calls for each in call):
            tensors += [product.packed] if product.bias is None else [product.packed, product.bias]
    return sum(torch.Size(each.shape).numel() * getattr(torch, each.dtype).itemsize for each in tensors)
