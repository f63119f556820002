"""Memory of the host: the memory that this process uses, huge pages, and what the C library does with freed memory."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from inflight.config.control_groups import ROOT
from inflight.config.free_memory import read_field
from inflight.errors import OutOfMemoryError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30
_DEFAULT_BYTES = 128 * 1024  # glibc's first value of both thresholds


def resident_bytes(root: Path = ROOT) -> int:
    """Returns the memory that this process uses; 0 if the host does not report it."""
    return 1024 * (read_field(root / "proc/self/status", "VmRSS:") or 0)


def own_bytes(root: Path = ROOT) -> int:
    """Returns the memory that this process uses, without pages of files, which the system can take back; 0 if the host does not
    report it."""
    return 1024 * (read_field(root / "proc/self/status", "RssAnon:") or 0)


def file_bytes(root: Path = ROOT) -> int:
    """Returns the memory that this process uses for pages of files, as of mapped weights; 0 if the host does not report it."""
    return 1024 * (read_field(root / "proc/self/status", "RssFile:") or 0)


def peak_resident_bytes(root: Path = ROOT) -> int:
    """Returns the most memory that this process has used since `reset_peak`; 0 if the host does not report it."""
    return 1024 * (read_field(root / "proc/self/status", "VmHWM:") or 0)


def reset_peak(root: Path = ROOT) -> None:
    """Sets the peak to the memory in use. If the host does not allow this, the peak counts from the start of the process."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return  # in a sandbox; then `peak_resident_bytes` may be too high, never too low


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Calls `work` and returns the most bytes of memory that it uses at once: see `Device.measure_peak_bytes`."""
    call_c_library("malloc_trim", 0)  # otherwise `work` could reuse freed memory, which would not be counted
    before = resident_bytes()
    files_before = file_bytes()
    reset_peak()
    work()
    # mapped weights that `work` reads for the first time are no memory of its own
    read = max(0, file_bytes() - files_before)
    return max(0, peak_resident_bytes() - read - before)


def map_arena(num_blocks: int, block_bytes: int) -> mmap.mmap:
    """Maps zeroed memory for blocks of a KV cache. The operating system provides a page when it is first touched, so unused
    parts cost nothing.

    Raises:
        OutOfMemoryError: the operating system refuses it.
    """
    num_bytes = num_blocks * block_bytes
    assert num_bytes > 0, f"an arena of {num_blocks} blocks of {block_bytes} bytes"
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemoryError(
            f"the KV cache of {num_blocks} blocks, {num_bytes / 2**30:.1f} GiB, cannot be allocated ({error}): "
            "lower kv_cache_memory_bytes or max_model_len"
        ) from error
    advise_huge_pages(pages)
    return pages


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Requests huge pages for a mapping, because they make reading 10 % faster. If the operating system has none, the pages
    stay small."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


class KeptMemory:
    """While one of these objects is in use, a step's activations reuse the memory that the previous step freed, instead of new
    pages that must be zeroed.

    By default glibc maps and unmaps every large tensor: 88,000 page faults in a prefill of 1,024 tokens of Qwen3-0.6B, 5 % of
    its time. The settings are those of the whole process, so the last `release` sets them back, for the program that goes on
    without an engine, and returns what is free.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_in_use: ClassVar[int] = 0

    def __init__(self) -> None:
        self._is_in_use = True
        with KeptMemory._lock:
            KeptMemory._num_in_use += 1
            _set_thresholds(_KEPT_BYTES, _KEPT_BYTES)

    def release(self) -> None:
        """Idempotent."""
        with KeptMemory._lock:
            was_in_use = self._is_in_use
            self._is_in_use = False
            KeptMemory._num_in_use -= was_in_use
            if was_in_use and not KeptMemory._num_in_use:
                _set_thresholds(
                    _threshold_of(os.environ, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"),
                    _threshold_of(os.environ, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
                )
                call_c_library("malloc_trim", 0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    call_c_library("mallopt", _M_MMAP_THRESHOLD, mmap_bytes)
    call_c_library("mallopt", _M_TRIM_THRESHOLD, trim_bytes)


def _threshold_of(environment: Mapping[str, str], variable: str, tunable: str) -> int:
    """Returns a threshold as glibc reads it at the start of a process: a tunable, an older variable, or the default."""
    tunables = dict(each.partition("=")[::2] for each in environment.get("GLIBC_TUNABLES", "").split(":"))
    with suppress(ValueError):
        return int(tunables.get(tunable) or environment.get(variable, ""), 0)
    return _DEFAULT_BYTES


def call_c_library(name: str, *arguments: int) -> None:
    """Calls a function of the C library, if the library has it."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
