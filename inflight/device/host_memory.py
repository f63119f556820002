"""Memory of the host: the memory that this process uses, huge pages, and what the C library does with freed memory."""

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from inflight.config.control_groups import ROOT
from inflight.config.free_memory import read_field

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
