"""A covering array: few rows that hold every combination of values of any few factors.

    covering_array({"depth": [1, 2], "tp": [1, 2], "grammar": [None, "json", "regex"]}, strength=2)

Rows are built greedily, as AETG does (Cohen et al., "The AETG System", 1997): each begins with a combination that no row holds
yet, and takes, factor by factor in random order, the value that adds most new ones; the best of some attempts is kept.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

Row = dict[str, Hashable]  # factor -> value
_Pair = tuple[int, int]  # (factor, value), both as indices

NUM_ATTEMPTS = 12


def covering_array(
    factors: Mapping[str, Sequence[Hashable]],
    strength: int = 3,
    is_allowed: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
) -> list[Row]:
    """The same rows for the same arguments.

    Args:
        factors: their values, any number each.
        strength: every combination of values of so many factors is in a row, if any allowed row can hold it.
        is_allowed: of a row of some or all factors: False if no row with these values may be.
    """
    return _Builder(factors, is_allowed, random.Random(seed)).build(strength)


class _Builder:
    def __init__(
        self, factors: Mapping[str, Sequence[Hashable]], is_allowed: Callable[[Row], bool], rng: random.Random
    ) -> None:
        self._names = list(factors)
        self._values = [list(values) for values in factors.values()]
        self._is_allowed = is_allowed
        self._rng = rng
        pairs = [(factor, value) for factor, values in enumerate(self._values) for value in range(len(values))]
        # the sum of some pairs' bits stands for these pairs
        self._bits = {pair: 1 << i for i, pair in enumerate(pairs)}
        self._uncovered: dict[int, tuple[_Pair, ...]] = {}  # sum -> pairs

    def build(self, strength: int) -> list[Row]:
        self._uncovered = {sum(self._bits[pair] for pair in pairs): pairs for pairs in self._combinations(strength)}
        rows = []
        while self._uncovered:
            number, first = next(iter(self._uncovered.items()))
            attempts = [self._attempt(first, strength) for _ in range(NUM_ATTEMPTS)]
            found = [row for row in attempts if row is not None]
            if not found:  # no row can hold it
                del self._uncovered[number]
                continue
            best = max(found, key=lambda row: sum(held in self._uncovered for held in self._held(row, strength)))
            for held in self._held(best, strength):
                self._uncovered.pop(held, None)
            rows.append(self._named(best))
        return rows

    def _combinations(self, strength: int) -> Iterator[tuple[_Pair, ...]]:
        for chosen in itertools.combinations(range(len(self._names)), strength):
            yield from itertools.product(
                *([(factor, i) for i in range(len(self._values[factor]))] for factor in chosen)
            )

    def _attempt(self, first: tuple[_Pair, ...], strength: int) -> dict[int, int] | None:
        row = dict(first)
        others = [factor for factor in range(len(self._names)) if factor not in row]
        self._rng.shuffle(others)
        return row if self._is_allowed(self._named(row)) and self._complete(row, others, strength) else None

    def _complete(self, row: dict[int, int], others: list[int], strength: int) -> bool:
        """Give the other factors values, most new combinations first; back to the one before where nothing is allowed."""
        if not others:
            return True
        factor, *rest = others
        values = list(range(len(self._values[factor])))
        self._rng.shuffle(values)
        values.sort(key=lambda value: self._num_new(row, (factor, value), strength), reverse=True)
        for value in values:
            row[factor] = value
            if self._is_allowed(self._named(row)) and self._complete(row, rest, strength):
                return True
        del row[factor]
        return False

    def _num_new(self, row: dict[int, int], pair: _Pair, strength: int) -> int:
        bit = self._bits[pair]
        held = itertools.combinations([self._bits[other] for other in row.items()], strength - 1)
        return sum(sum(others, bit) in self._uncovered for others in held)

    def _held(self, row: dict[int, int], strength: int) -> Iterator[int]:
        return map(sum, itertools.combinations([self._bits[pair] for pair in row.items()], strength))

    def _named(self, row: dict[int, int]) -> Row:
        return {self._names[factor]: self._values[factor][value] for factor, value in sorted(row.items())}
