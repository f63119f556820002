"""How much memory of the host is free: of the machine, or of the container or service manager that limits this process.

`count_memory_kills` says how often the kernel has ended processes because there was none left.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from inflight.config.control_groups import ROOT, ControlGroup, groups_of

# version of control groups -> file of the limit, file of the usage
MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
# Version of control groups -> fields of memory.stat with memory that counts as used, and that the kernel takes back when a
# process needs it. A file that is read once is in the page cache as "inactive", one that is read twice is "active". Pages of
# tmpfs and of locked files are in neither of them.
_RECLAIMABLE = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}
# Version of control groups -> file and field with the number of processes that the kernel has ended at the limit
KILLS = {1: ("memory.oom_control", "oom_kill"), 2: ("memory.events", "oom_kill")}


def available_bytes(root: Path = ROOT) -> int:
    """Returns the memory that the system reports as available, or less if a control group of this process allows less.

    `root`: the folder that contains `proc` and `sys`.
    """
    return max(0, min([_host_available_bytes(root), *_cgroup_headrooms(root)]))


def is_limited(root: Path = ROOT) -> bool:
    """Whether a control group, and not the machine, decides how much memory is available."""
    return min(_cgroup_headrooms(root), default=_host_available_bytes(root)) < _host_available_bytes(root)


def _host_available_bytes(root: Path) -> int:
    available = read_field(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yields limit minus use for each control group that has a limit, from the process's own group up to the root."""
    for group in groups_of("memory", root):
        limit_name, usage_name = MEMORY_FILES[group.version]
        limit = _read_int(group.folder / limit_name)
        usage = _read_int(group.folder / usage_name)
        if limit is not None and usage is not None:
            yield limit - max(0, usage - _reclaimable_bytes(group))


def _reclaimable_bytes(group: ControlGroup) -> int:
    return sum(read_field(group.folder / "memory.stat", name) or 0 for name in _RECLAIMABLE[group.version])


def count_memory_kills(root: Path = ROOT) -> int:
    """Returns how many processes the kernel has ended so far for lack of memory: on this machine, or at the limit of a control
    group of this process. 0 if the kernel does not count them."""
    counts = [read_field(root / "proc/vmstat", "oom_kill") or 0]
    for group in groups_of("memory", root):
        name, field = KILLS[group.version]
        counts.append(read_field(group.folder / name, field) or 0)
    return sum(counts)


def read_field(path: Path, name: str) -> int | None:
    """Returns the number in the line "`name` number" of a file; None if there is no such line or file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _read_int(path: Path) -> int | None:
    """Returns the number in `path`; None if the file does not exist or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
