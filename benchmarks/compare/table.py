"""From the speeds of all runs to the tables of `benchmarks.compare`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# what is asked of us, in tokens per second on two cores of Zen 4: (shape, our format) -> workload -> speed
GOALS: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-0.6b", "bf16"): {"decode1": 25.5, "decode8": 180, "decode32": 310, "prefill": 390, "mixed": 80},
    ("qwen3-0.6b", "int8"): {"decode1": 46, "decode8": 300, "decode32": 500, "prefill": 680, "mixed": 130},
}


@dataclass(frozen=True)
class Spread:
    """The median of some figures, the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Pairs:
    """Our speeds and a peer's in one workload, in tokens per second: entry i of both is of the same round."""

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratio(self) -> Spread:
        return Spread.of([ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)])


@dataclass(frozen=True)
class Column:
    """One workload in one format. `peers`: label -> what was measured; `ours`: every speed of ours."""

    ours: Sequence[float]
    peers: Mapping[str, Pairs]
    roofline: float
    goal: float | None

    @property
    def best_peer(self) -> str:
        return max(self.peers, key=lambda label: statistics.median(self.peers[label].theirs))


def table_rows(our_label: str, columns: Mapping[str, Column]) -> list[list[str]]:
    """The header and the rows; a column per workload. There is at least one, and all have the same peers."""
    every = list(columns.values())
    labels = list(every[0].peers)
    medians = [statistics.median(column.ours) for column in every]
    rows = [["tokens/s", *columns], ["roofline", *(f"{column.roofline:.1f}" for column in every)]]
    if any(column.goal is not None for column in every):
        rows.append(["goal", *("" if column.goal is None else f"{column.goal:g}" for column in every)])
    rows.append([our_label, *(f"{median:.1f}" for median in medians)])
    for label in labels:
        rows.append([label, *(f"{statistics.median(column.peers[label].theirs):.1f}" for column in every)])
    for label in labels:
        rows.append([f"ours / {label}", *(str(column.peers[label].ratio) for column in every)])
    if labels:
        rows.append(["best peer", *(column.best_peer for column in every)])
        ahead = [column.peers[column.best_peer].ratio.median > 1 for column in every]
        rows.append(["ahead of it", *("yes" if is_ahead else "NO" for is_ahead in ahead)])
    shares = [median / column.roofline for median, column in zip(medians, every, strict=True)]
    rows.append(["ours / roofline", *(f"{share:.0%}" for share in shares)])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header; columns are padded so that the text reads as a table, too."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
