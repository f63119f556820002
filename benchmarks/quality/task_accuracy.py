"""How often the embedded model answers right in each format: the same held-out prompts for all, greedy, exact match.

A part of `benchmarks.accuracy`. Paired: of a format and bf16 only the prompts count that one of them answers right and the
other wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.formats import FORMATS
from benchmarks.shared.report import emit, print_table, verdict
from inflight import LLM
from inflight.hub import EMBEDDED_MODEL
from scripts.demo.evaluate import answers_of, held_out_samples
from scripts.demo.tasks import KINDS, MULTI_TURN, is_correct

BASE = "bf16"
KV_BYTES = 256 << 20
Answers = dict[str, list[bool]]  # kind -> whether each of its samples was answered right


@dataclass(frozen=True)
class Loss:
    """Percentage points that a format loses, with the standard error of a paired difference."""

    points: float
    error: float

    @classmethod
    def of(cls, base: Sequence[bool], other: Sequence[bool]) -> Loss:
        differences = [int(before) - int(after) for before, after in zip(base, other, strict=True)]
        count = len(differences)
        mean = sum(differences) / count
        variance = sum((difference - mean) ** 2 for difference in differences) / count
        return cls(100 * mean, 100 * math.sqrt(variance / count))

    def __str__(self) -> str:
        return f"{self.points:+.2f} +- {self.error:.2f}"


def is_right(name: str, count: int) -> Answers:
    """`count` prompts of each kind, answered by an engine in format `name`."""
    arguments = {"dtype": "bfloat16", "kv_cache_memory_bytes": KV_BYTES, **FORMATS[name].engine_args}
    found = {}
    with LLM(str(EMBEDDED_MODEL), **arguments) as llm:
        for kind in (*KINDS, MULTI_TURN):
            samples = held_out_samples(kind, count)
            texts = answers_of(llm, samples)
            found[kind] = [is_correct(sample, text) for sample, text in zip(samples, texts, strict=True)]
    return found


def print_task_accuracy(names: Sequence[str], count: int) -> bool:
    """`count` prompts of each kind. Whether every format keeps to its bar."""
    base = is_right(BASE, count)
    everything = [answer for answers in base.values() for answer in answers]
    rows = [[BASE, *(percent(answers) for answers in base.values()), percent(everything), "", ""]]
    is_met = True
    for name in names:
        if name == BASE:
            continue
        found = is_right(name, count)
        answers = [answer for each in found.values() for answer in each]
        loss, bar = Loss.of(everything, answers), FORMATS[name].max_points_lost
        is_met &= loss.points <= bar
        emit(
            benchmark="accuracy", part="tasks", format=name, points_lost=round(loss.points, 3),
            error=round(loss.error, 3), bar=bar, **{kind: float(percent(each)) for kind, each in found.items()},
        )  # fmt: skip
        cells = [percent(each) for each in found.values()]
        rows.append([name, *cells, percent(answers), str(loss), f"<= {bar:g} {verdict(loss.points <= bar)}"])
    print_table(["% right", *base, "all", "points lost", "bar"], rows)
    return is_met


def percent(answers: Sequence[bool]) -> str:
    return f"{100 * sum(answers) / len(answers):.1f}"
