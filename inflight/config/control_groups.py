"""Control groups: what a container, a service manager or a batch system lets this process use of the machine. Linux only.

A limit of a group holds for all groups in it, so each one from the process's own up to the root counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class ControlGroup(NamedTuple):
    folder: Path
    version: int  # 1 or 2: the files of a folder have other names


def groups_of(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """The groups around this process in which `controller` ("memory", "cpu") may set limits, the process's own first.

    `root` is the folder that `proc` and `sys` are in.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no control groups here
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = mount, 2
        elif controller in controllers.split(","):
            top, version = mount / controller, 1
        else:
            continue
        # In a container the path may be the host's, and only the mount's top, the container's own group, is there.
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield ControlGroup(folder, version)
            if folder == top:
                break


def cpu_quota(root: Path = ROOT) -> float | None:
    """The processor time that this process may use, in seconds a second: 2.5 is two and a half cores. None: no limit."""
    return min((quota for group in groups_of("cpu", root) if (quota := _cpu_quota(group)) is not None), default=None)


def _cpu_quota(group: ControlGroup) -> float | None:
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((group.folder / name).read_text() for name in names).split()
    except OSError:
        return None
    # microseconds of processor time, and of the period in which they may be used; no limit is "max" or -1
    if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        return None
    return int(words[0]) / int(words[1])
