"""`spread`: the order in which the tests run, so that all pytest workers end at about the same time.

With `--dist worksteal` each worker begins with an equal number of tests that follow each other. In the order of their names one
worker would get all tests of whole servers, and in the end the others would have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

Item = TypeVar("Item")


def spread(
    items: Sequence[tuple[str, Item]], seconds: Mapping[str, float], num_workers: int, *, least: float = 5.0
) -> list[Item]:
    """Returns the items in the order in which they shall run. Items of one file stay together, but for a file that lies at the
    border between two workers.

    Args:
        items: (name of the file, item), ordered by file.
        seconds: name of a file -> how long all its items take.
        least: files that take less are not weighed; they fill the workers' shares up to equal numbers of items.
    """
    files = [[item for _, item in group] for _, group in groupby(items, key=lambda pair: pair[0])]
    names = [name for name, _ in groupby(items, key=lambda pair: pair[0])]
    order = sorted(range(len(files)), key=lambda index: -seconds.get(names[index], 0.0))
    shares: list[list[Item]] = [[] for _ in range(num_workers)]
    loads = [0.0] * num_workers
    light: list[Item] = []
    for index in order:
        if seconds.get(names[index], 0.0) < least:
            light += files[index]
            continue
        share = loads.index(min(loads))
        shares[share] += files[index]
        loads[share] += seconds[names[index]]
    size = -(-len(items) // num_workers)
    for share_items in shares:
        missing = max(size - len(share_items), 0)
        share_items += light[:missing]
        light = light[missing:]
    return [item for share_items in shares for item in share_items] + light
