"""What the benchmarks share: JSON lines, a table at the end, percentiles, and the memory of a process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 2**20


def allow_slow_steps() -> None:
    """A step on a busy machine may outlive the default budget; here that is a slow measurement and no failure."""
    os.environ.setdefault("INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS", "900")


def emit(**fields: Any) -> None:  # Any: JSON
    """One result as one JSON line, at once."""
    print(json.dumps(fields), flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Right-aligned columns, the first one left-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print()
    for row in cells:
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([first.strip().ljust(widths[0]), *others]), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def memory_bytes(field: str) -> int:
    """VmRSS (now), RssAnon (without mapped files) or VmHWM (the highest so far) of this process. Linux only."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
