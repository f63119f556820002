"""`GraphRunner`: records the kernels of a step as CUDA graphs, one for each size that steps are padded to, and launches them.

A program is a function that launches the kernels for one size. Each program runs once before it is recorded. The largest size
is recorded first, so that the graphs of smaller sizes can reuse its memory.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from inflight.device.accelerator import Accelerator, no_garbage_collection

logger = logging.getLogger(__name__)

GraphKey = tuple[str, int]  # (name of a program, size)
GRAPH_BYTES = 4 << 20  # bytes that the driver needs for one graph, without the memory that the graph's kernels use

Program = Callable[[int], None]  # launches the kernels for one size


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The time and memory that the recording needed."""

    num_graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0


def decode_sizes(most: int) -> list[int]:
    """The batch sizes that decode steps are padded to: 1, 2, 4, 8, then in increments that grow from 8 to 64. The last
    size is `most`."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        if last < 8:
            step = 4
        elif last < 64:
            step = 8
        elif last < 128:
            step = 16
        elif last < 256:
            step = 32
        else:
            step = 64
        sizes.append(last + step)
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(most: int) -> list[int]:
    """The token counts that mixed batches (of prompt and decode tokens) are padded to. The last is `most`."""
    sizes = [size for size in (16, 32, 64, 96, 128, 192, 256, 384) if size < most]
    while sizes and sizes[-1] >= 256 and sizes[-1] + 128 < most:
        sizes.append(sizes[-1] + 128)
    return [*sizes, most] if most > 0 else []


def padded_size(size: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that is at least `size`. If all are smaller, `size` itself."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else size


class GraphRunner:
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._graphs: dict[GraphKey, Callable[[], None]] = {}  # each launches a graph
        self.report = GraphReport()

    def capture(
        self, programs: Sequence[tuple[str, Sequence[int], Program]], stage_dummies: Callable[[str, int], None]
    ) -> None:
        """Record each program for each of its sizes. Before each recording, `stage_dummies(name, size)` queues the copy of
        dummy inputs to the device. Other threads must not queue work on the device until this function returns."""
        start = time.perf_counter()
        before = self._device.available_memory_bytes()
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
        logger.info(
            "recorded %d CUDA graphs in %.1f s; they use %.0f MiB of the GPU",
            len(keys),
            self.report.seconds,
            taken / 2**20,
        )

    def enqueue(self, name: str, size: int, program: Program) -> None:
        """Queue the program's graph of this size. If none was recorded, queue `program` itself."""
        self._device.compute.enqueue(self._graphs.get((name, size)) or partial(program, size))
