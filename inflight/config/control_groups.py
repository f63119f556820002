"""Linux control groups: how much memory and processor time a container or a service manager lets this process use.

The limit of a group holds for all groups inside it. So a process has the limits of its own group and of every group above it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class ControlGroup(NamedTuple):
    folder: Path
    version: int  # version 1 or 2 of control groups; the two versions use different file names


def groups_of(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Yields the groups that may limit this process's "memory" or "cpu" (`controller`): its own group, then those above it.

    `root`: the folder that contains `proc` and `sys`.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no control groups here
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
            version = 2
        elif controller in controllers.split(","):
            top = mount / controller
            version = 1
        else:
            continue
        # In a container, `path` may be a path on the host, which does not exist here. Then the top of the mount is the
        # container's own group.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield ControlGroup(folder, version)
            if folder == top:
                break


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processor time that this process may use, in cores: 2.5 means 2.5 seconds in each second. None means no limit."""
    return min((quota for group in groups_of("cpu", root) if (quota := _cpu_quota(group)) is not None), default=None)


def _cpu_quota(group: ControlGroup) -> float | None:
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((group.folder / name).read_text() for name in names).split()
    except OSError:
        return None
    # processor time and period, both in microseconds; "max" or -1 means no limit
    are_positive = all(word.isdecimal() and int(word) > 0 for word in words)
    if len(words) != 2 or not are_positive:
        return None
    return int(words[0]) / int(words[1])
