"""Memory of the host: how much it, or the container around this process, still has; how much this process uses; huge pages."""

from __future__ import annotations

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


def available_bytes(root: Path = ROOT) -> int:
    """The memory that the operating system calls available, within the limits of every control group around this process.

    `root`: the folder that contains `proc` and `sys`.
    """
    return max(0, min([_host_available_bytes(root), *_cgroup_headrooms(root)]))


def _host_available_bytes(root: Path) -> int:
    available = _read_field(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit minus use, for each group that has a limit, from the process's own up to the root.

    Page cache that nobody uses right now (`inactive_file`) counts as free, as container runtimes count it.
    """
    for folder, version in groups_of("memory", root):
        limit_name, usage_name, cache_name = _MEMORY_FILES[version]
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is not None and usage is not None:
            yield limit - usage + (_read_field(folder / "memory.stat", cache_name) or 0)


def resident_bytes(root: Path = ROOT) -> int:
    """The memory that this process uses; 0 if the host does not say."""
    return 1024 * (_read_field(root / "proc/self/status", "VmRSS:") or 0)


def peak_resident_bytes(root: Path = ROOT) -> int:
    """The most memory that this process has used since `reset_peak`; 0 if the host does not say."""
    return 1024 * (_read_field(root / "proc/self/status", "VmHWM:") or 0)


def reset_peak(root: Path = ROOT) -> None:
    """Set the peak to the memory in use. If the host does not allow it, the peak remains that of the whole process."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return  # a sandbox: `peak_resident_bytes` then only overestimates


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Ask for huge pages: they are read 10 % faster. A kernel that was built without them uses small pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


def _read_int(path: Path) -> int | None:
    """The number in `path`; None if there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_field(path: Path, name: str) -> int | None:
    """The number behind `name` in a file of "name number" lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None
