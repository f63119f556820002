"""`CpuGroup`: a control group whose processor time can be limited, as `docker run --cpus` does. Needs root."""

from __future__ import annotations

from benchmarks.shared.control_group import BenchmarkGroup

PERIOD_US = 100_000  # of Docker and Kubernetes


class CpuGroup(BenchmarkGroup):
    """Raises: see `BenchmarkGroup`."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def limit(self, cores: float | None) -> None:
        """From now on the processes of the group together may use at most `cores` cores; None: there is no limit."""
        microseconds = None if cores is None else round(cores * PERIOD_US)
        if self.version == 2:
            self.write("cpu.max", f"{microseconds or 'max'} {PERIOD_US}")
        else:
            self.write("cpu.cfs_period_us", str(PERIOD_US))
            self.write("cpu.cfs_quota_us", str(microseconds or -1))

    def throttling(self) -> tuple[int, int]:
        """In how many periods processes of the group ran under a limit, and in how many of these they were stopped."""
        numbers = self.fields("cpu.stat")
        return numbers["nr_periods"], numbers["nr_throttled"]
