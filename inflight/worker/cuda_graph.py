"""`GraphRunner`: records the programs of a step as CUDA graphs, one for each size that steps are padded to, and launches them.

Each program runs once before it is recorded. The largest size is recorded first: smaller ones then take their memory from what
the larger ones have left in the pool.
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

GraphKey = tuple[str, int]  # name of a program, size
GRAPH_BYTES = 4 << 20  # memory that the driver needs for one graph of a model's kernels, besides the pool

Program = Callable[[int], None]  # launches the kernels for one size


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The time and memory that recording took."""

    num_graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0


def decode_sizes(most: int) -> list[int]:
    """Batch sizes that decode steps are padded to: 1, 2, 4, 8, then each up to a quarter larger, and last `most`."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + (4 if last < 8 else 8 if last < 64 else 16 if last < 128 else 32 if last < 256 else 64))
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(most: int) -> list[int]:
    """Token counts that mixed batches are padded to; the last is `most`."""
    sizes = [size for size in (16, 32, 64, 96, 128, 192, 256, 384) if size < most]
    while sizes and sizes[-1] >= 256 and sizes[-1] + 128 < most:
        sizes.append(sizes[-1] + 128)
    return [*sizes, most] if most > 0 else []


def padded_size(size: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that is not below `size`; `size` itself if all are below it."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else size


class GraphRunner:
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._graphs: dict[GraphKey, Graph] = {}
        self.report = GraphReport()

    def capture(
        self, programs: Sequence[tuple[str, Sequence[int], Program]], stage_dummies: Callable[[str, int], None]
    ) -> None:
        """Record each program for each of its sizes; `stage_dummies` queues its inputs. Nothing else may be queued."""
        start, before = time.perf_counter(), self._device.available_memory_bytes()
        keys = [(name, size, program) for name, sizes, program in programs for size in sizes]
        with no_garbage_collection():
            for name, size, program in sorted(keys, key=lambda key: -key[1]):
                stage_dummies(name, size)
                launch = partial(program, size)
                self._device.compute.enqueue(launch)  # compiles kernels, and allocates memory that is kept
                self._device.compute.record().synchronize()
                self._graphs[name, size] = self._device.capture(launch)
        taken = max(0, before - self._device.available_memory_bytes())
        self.report = GraphReport(len(keys), time.perf_counter() - start, taken)
        logger.info("recorded %d graphs in %.1f s: %.0f MiB", len(keys), self.report.seconds, taken / 2**20)

    def enqueue(self, name: str, size: int, program: Program) -> None:
        """Queue the graph of that size, or `program` itself if there is none."""
        graph = self._graphs.get((name, size))
        self._device.compute.enqueue(graph.replay if graph is not None else lambda: program(size))
