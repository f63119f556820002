"""`CpuGroup`: a control group whose processor time can be limited, as `docker run --cpus` does. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inflight.config.control_groups import groups_of

PERIOD_US = 100_000  # of Docker and Kubernetes


class CpuGroup:
    """A context manager: the group is made inside the group of this process, and removed at the end.

    Raises:
        SystemExit: the operating system refuses.
    """

    def __init__(self) -> None:
        group = next(iter(groups_of("cpu")), None)
        if group is None:
            raise SystemExit("a quota needs control groups, and there are none here")
        self._parent, self._version = group.folder, group.version
        self._folder = self._parent / f"inflight-benchmark-{os.getpid()}"

    def __enter__(self) -> CpuGroup:
        try:
            if self._version == 2:
                (self._parent / "cgroup.subtree_control").write_text("+cpu")
            self._folder.mkdir()
        except OSError as error:
            raise SystemExit(f"no control group can be made in {self._parent}: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a process that was killed may be there for a moment longer
            self._folder.rmdir()

    def limit(self, cores: float | None) -> None:
        """From now on the processes of the group together may use at most `cores` cores; None: there is no limit."""
        microseconds = None if cores is None else round(cores * PERIOD_US)
        if self._version == 2:
            self._write("cpu.max", f"{microseconds or 'max'} {PERIOD_US}")
        else:
            self._write("cpu.cfs_period_us", str(PERIOD_US))
            self._write("cpu.cfs_quota_us", str(microseconds or -1))

    def throttling(self) -> tuple[int, int]:
        """In how many periods processes of the group ran under a limit, and in how many of these they were stopped."""
        lines = (self._folder / "cpu.stat").read_text().splitlines()
        numbers = {name: int(value) for name, value in (line.split() for line in lines)}
        return numbers["nr_periods"], numbers["nr_throttled"]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, this process belongs to the group. Processes that it starts meanwhile stay in the group."""
        self._write("cgroup.procs", str(os.getpid()))
        try:
            yield
        finally:
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))

    def _write(self, name: str, text: str) -> None:
        Path(self._folder / name).write_text(text)
