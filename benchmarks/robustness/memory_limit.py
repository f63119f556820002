"""`MemoryGroup`: a control group that measures its memory, and can limit it as `docker run --memory` does. Needs root."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.shared.control_group import BenchmarkGroup
from inflight.config.free_memory import KILLS, MEMORY_FILES

SAMPLE_SECONDS = 0.02
# Version of control groups -> the fields of memory.stat whose sum is the memory that the processes cannot give back: their own
# pages, and the pages of files and of shared memory that they have mapped.
_NEEDED = {1: ("total_rss", "total_mapped_file"), 2: ("anon", "file_mapped", "kernel")}


class MemoryGroup(BenchmarkGroup):
    """Raises: see `BenchmarkGroup`."""

    def __init__(self) -> None:
        super().__init__("memory")

    def limit(self, num_bytes: int) -> None:
        """From now on the processes of the group together may use at most so much memory."""
        limit_name, _ = MEMORY_FILES[self.version]
        self.write(limit_name, str(num_bytes))

    def needed_bytes(self) -> int:
        numbers = self.fields("memory.stat")
        needed = sum(numbers.get(name, 0) for name in _NEEDED[self.version])
        if self.version == 1:
            needed += int((self.folder / "memory.kmem.usage_in_bytes").read_text())
        return needed

    def num_kills(self) -> int:
        """How many processes of the group the kernel has ended at the limit."""
        file, field = KILLS[self.version]
        return self.fields(file).get(field, 0)

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Samples the memory while the context is open. Then the list has one entry: the most bytes that the group needed."""
        found: list[int] = []
        ended = threading.Event()
        most = 0

        def sample() -> None:
            nonlocal most
            while not ended.wait(SAMPLE_SECONDS):
                most = max(most, self.needed_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield found
        finally:
            ended.set()
            sampler.join()
            found.append(most)
