"""Memory of the host: the free memory of the machine or container, the memory that this process uses, and huge pages."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from inflight.config.control_groups import ROOT, groups_of

# version of control groups -> file of the limit, file of the usage, name of the page cache in memory.stat
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30


def available_bytes(root: Path = ROOT) -> int:
    """Returns the memory that the system reports as available, or less if a control group of this process allows less.

    `root`: the folder that contains `proc` and `sys`.
    """
    return max(0, min([_host_available_bytes(root), *_cgroup_headrooms(root)]))


def _host_available_bytes(root: Path) -> int:
    available = _read_field(root / "proc/meminfo", "MemAvailable:")
    return available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yields limit minus use for each control group that has a limit, from the process's own group up to the root.

    Page cache that nobody uses right now (`inactive_file`) counts as free. Container runtimes count in the same way.
    """
    for folder, version in groups_of("memory", root):
        limit_name, usage_name, cache_name = _MEMORY_FILES[version]
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is not None and usage is not None:
            yield limit - usage + (_read_field(folder / "memory.stat", cache_name) or 0)


def resident_bytes(root: Path = ROOT) -> int:
    """Returns the memory that this process uses; 0 if the host does not report it."""
    return 1024 * (_read_field(root / "proc/self/status", "VmRSS:") or 0)


def peak_resident_bytes(root: Path = ROOT) -> int:
    """Returns the most memory that this process has used since `reset_peak`; 0 if the host does not report it."""
    return 1024 * (_read_field(root / "proc/self/status", "VmHWM:") or 0)


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


def _read_int(path: Path) -> int | None:
    """Returns the number in `path`; None if the file does not exist or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_field(path: Path, name: str) -> int | None:
    """Returns the number in the line "`name` number" of a file; None if there is no such line or file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def keep_freed() -> None:
    """Lets a step's activations reuse the memory that the previous step freed, instead of new pages that must be zeroed.

    By default glibc maps and unmaps every large tensor: 88,000 page faults in a prefill of 1,024 tokens of Qwen3-0.6B, 5 % of
    its time.
    """
    call_c_library("mallopt", _M_MMAP_THRESHOLD, _KEPT_BYTES)
    call_c_library("mallopt", _M_TRIM_THRESHOLD, _KEPT_BYTES)


def call_c_library(name: str, *arguments: int) -> None:
    """Calls a function of the C library, if the library has it."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
