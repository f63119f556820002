"""`BenchmarkGroup`: a control group that a benchmark makes, puts processes into, and removes. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from inflight.config.control_groups import groups_of


class BenchmarkGroup:
    """A context manager: the group is made inside the group of this process, and removed at the end.

    Args:
        controller: "cpu" or "memory".

    Attributes:
        folder: of the group, with the files that limit it and tell what it uses.
        version: 1 or 2, of the control groups of this machine.

    Raises:
        SystemExit: there are no control groups here, or the operating system refuses.
    """

    def __init__(self, controller: str) -> None:
        group = next(iter(groups_of(controller)), None)
        if group is None:
            raise SystemExit("a limit needs control groups, and there are none here")
        self._controller = controller
        self._parent, self.version = group
        self.folder = self._parent / f"inflight-benchmark-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            if self.version == 2:
                (self._parent / "cgroup.subtree_control").write_text(f"+{self._controller}")
            self.folder.mkdir()
        except OSError as error:
            raise SystemExit(f"no control group can be made in {self._parent}: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a process that was killed may be there for a moment longer
            self.folder.rmdir()

    @property
    def prefix(self) -> list[str]:
        """A command that runs another command, of the arguments after it, in the group, with the same process id."""
        return ["sh", "-c", f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"', "sh"]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, this process belongs to the group. Processes that it starts meanwhile stay in the group."""
        self.write("cgroup.procs", str(os.getpid()))
        try:
            yield
        finally:
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))

    def write(self, name: str, text: str) -> None:
        Path(self.folder / name).write_text(text)

    def fields(self, name: str) -> dict[str, int]:
        """The numbers of a file that has a name and a number in each line."""
        lines = Path(self.folder / name).read_text().splitlines()
        return {field: int(value) for field, value in (line.split() for line in lines)}
