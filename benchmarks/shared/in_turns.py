"""Two ways of doing the same, in turns: the speeds of both, and their ratio round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.compare.table import Spread
from benchmarks.shared.report import emit

Measure = Callable[[], float]  # -> tokens per second


def compare_in_turns(benchmark: str, case: str, first: Measure, second: Measure, rounds: int) -> list[str]:
    """A row: the case, the median of each, and second / first. The first round of all is a warm-up, and the order changes from
    round to round."""
    speeds: tuple[list[float], list[float]] = ([], [])
    measures = (first, second)
    for index in range(rounds + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            speed = measures[side]()
            if index:
                speeds[side].append(speed)
    medians = [statistics.median(each) for each in speeds]
    ratio = Spread.of([after / before for before, after in zip(*speeds, strict=True)])
    emit(
        benchmark=benchmark, case=case, first=round(medians[0], 1), second=round(medians[1], 1),
        ratio=round(ratio.median, 3), low=round(ratio.low, 3), high=round(ratio.high, 3),
    )  # fmt: skip
    return [case, *(f"{median:.1f}" for median in medians), str(ratio)]
