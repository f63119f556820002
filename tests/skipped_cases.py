"""`keep_one_of_each`: of the cases of a test that are skipped for the same reason, one item stays.

A test of every case of a GPU kernel would otherwise be dozens of skipped items on a machine without a GPU, and nobody would see
among hundreds of them the test that a missing program skips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest


def keep_one_of_each(items: list[pytest.Item], reason_of: Callable[[pytest.Item], str]) -> list[pytest.Item]:
    """Mark what is skipped, and how many cases the item stands for. Of a `skipif` mark pytest shows the mark's own reason.

    Args:
        reason_of: why an item is skipped; "" if it runs.

    Returns:
        The items that run, and the first of each test and reason, in their order.
    """
    reasons = [reason_of(item) for item in items]
    count = Counter((_test_of(item), reason) for item, reason in zip(items, reasons, strict=True) if reason)
    kept = []
    for item, reason in zip(items, reasons, strict=True):
        if reason:
            num_cases = count.pop((_test_of(item), reason), 0)
            if not num_cases:
                continue
            item.add_marker(pytest.mark.skip(reason=reason if num_cases == 1 else f"{reason} ({num_cases} cases)"))
        kept.append(item)
    return kept


def reason_of_marks(item: pytest.Item) -> str:
    """The reason of the first `skipif` mark whose condition, a value and no text, holds; "" if there is none."""
    for mark in item.iter_markers("skipif"):
        if mark.args and mark.args[0] is True:
            return str(mark.kwargs["reason"])
    return ""


def _test_of(item: pytest.Item) -> str:
    """The id of the test whose case this is."""
    return item.nodeid.partition("[")[0]
