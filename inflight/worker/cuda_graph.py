"""`GraphRunner`: the work of a step by the size it is padded to, recorded once as graphs, and launched as such from then on.

Each size is recorded after a run of the same work, the largest first: the smaller ones then take their memory from what the
larger ones have left in the pool.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from inflight.device.accelerator import Accelerator, Graph, no_garbage_collection

logger = logging.getLogger(__name__)

GraphKey = tuple[str, int]  # what is done, and for how many
GRAPH_BYTES = 4 << 20  # of the driver for one graph of a model's kernels, beside the pool

Work = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What recording took."""

    num_graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0


def decode_sizes(most: int) -> list[int]:
    """Batch sizes that decode is padded to, up to and with `most`: 1, 2, 4, then ever wider steps of at most a quarter."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + (4 if last < 8 else 8 if last < 64 else 16 if last < 128 else 32 if last < 256 else 64))
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(most: int) -> list[int]:
    """Token counts that mixed batches are padded to, up to and with `most`."""
    sizes = [size for size in (16, 32, 64, 96, 128, 192, 256, 384) if size < most]
    while sizes and sizes[-1] >= 256 and sizes[-1] + 128 < most:
        sizes.append(sizes[-1] + 128)
    return [*sizes, most] if most > 0 else []


def padded_size(size: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds `size`; `size` itself where none does."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else size


class GraphRunner:
    """Used in stages."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._graphs: dict[GraphKey, Graph] = {}
        self.report = GraphReport()

    def capture(
        self, works: Sequence[tuple[str, Sequence[int], Work]], stage_dummies: Callable[[str, int], None]
    ) -> None:
        """Record each work for each of its sizes, each over what `stage_dummies` queues for it. Nothing else is queued."""
        start, before = time.perf_counter(), self._device.available_memory_bytes()
        keys = [(name, size, work) for name, sizes, work in works for size in sizes]
        with no_garbage_collection():
            for name, size, work in sorted(keys, key=lambda key: -key[1]):
                stage_dummies(name, size)
                self._capture(name, size, partial(work, size))
        taken = max(0, before - self._device.available_memory_bytes())
        self.report = GraphReport(len(keys), time.perf_counter() - start, taken)
        logger.info("recorded %d graphs in %.1f s: %.0f MiB", len(keys), self.report.seconds, taken / 2**20)

    def _capture(self, name: str, size: int, work: Callable[[], None]) -> None:
        self._device.compute.enqueue(work)  # compiles, and makes what lasts
        self._device.compute.record().synchronize()
        self._graphs[name, size] = self._device.capture(work)

    def enqueue(self, name: str, size: int, work: Work) -> None:
        """Queue the graph of that size, or `work` itself where there is none."""
        graph = self._graphs.get((name, size))
        self._device.compute.enqueue(graph.replay if graph is not None else lambda: work(size))
