"""`TunedLinear` and `tune`: GPU products with few rows, by the kernel that was measured as the fastest at start-up.

At start-up, the library behind torch and the Triton kernels with several tile sizes are timed on the model's own weights. This
is done for each kind and shape of weight, with 1, 2, 4, ... 64 rows. Later calls use the one that was the fastest.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from inflight.device.accelerator import no_garbage_collection
from inflight.device.cuda import drop_library_workspaces, record_graph
from inflight.kernels.triton.experts import ExpertWeights
from inflight.kernels.triton.layer_ops import multiply_gate
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig, is_of_the_tile
from inflight.layers.gpu_choices import Choices, KeptChoice, kept_choices
from inflight.layers.linear_method import LinearChoice

logger = logging.getLogger(__name__)

MIN_WEIGHT_BYTES = 1 << 20  # smaller weights always use the library
MAX_TUNED_ROWS = 64  # with more rows, reading the weights no longer limits the speed
_MIN_CALLS = 8  # the least number of calls in one measurement
# One measurement reads at least so many bytes, if all weights of this kind and shape together have so many.
_MIN_BYTES_READ = 256 << 20
# A weight is read again only after so many times the cache's size was read. By then the weight has left the cache.
_CACHES_READ = 2
_REPEATS = 4
_MIN_STAGES = 2  # with fewer, a program does not load while it computes


class GpuWeight(ABC):
    """One weight in the GPU's memory.

    Attributes:
        kind: the name of the weight's format. Weights of the same kind and shape are equally fast.
        shape: (out_features, in_features).
        num_bytes: the bytes that one multiplication reads.
    """

    kind: str
    shape: tuple[int, int]
    num_bytes: int

    @abstractmethod
    def tiles(self, num_multiprocessors: int) -> list[TileConfig]:
        """Tile sizes of the Triton kernel that are worth measuring."""

    @abstractmethod
    def multiply(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: TileConfig, scratch: SplitKScratch, *, gate: str | None
    ) -> None:
        """x [num_rows, in_features], at most `MAX_TUNED_ROWS` rows -> out [num_rows, out_features], by the Triton kernel. With
        a gate, out is [num_rows, out_features / 2]."""

    @abstractmethod
    def stack(self, weights: Sequence["GpuWeight"]) -> ExpertWeights:
        """The weights of a layer's experts, all of the same class, kind and shape, as one."""

    @abstractmethod
    def floats(self, dtype: torch.dtype) -> Tensor:
        """[out_features, in_features]"""

    @abstractmethod
    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [num_rows, in_features], any number of rows -> out [num_rows, out_features], without a gate."""


class TunedLinear:
    """A `PreparedLinear`. `scratch` is shared by layers that run one after another on one stream."""

    def __init__(self, weight: GpuWeight, bias: Tensor | None, scratch: SplitKScratch, *, gate: str | None) -> None:
        self.weight = weight
        self.bias = bias
        self.scratch = scratch
        self.gate = gate
        self.key = (weight.kind, weight.shape, gate)  # layers with equal keys are equally fast
        self.num_columns = weight.shape[0] // 2 if gate else weight.shape[0]  # the columns of a result
        # Number of rows, rounded up to a power of two -> tile size. Without an entry, the library is used.
        self.chosen: dict[int, TileConfig] = {}

    def __call__(self, x: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((len(x), self.num_columns), dtype=out_dtype, device=x.device)
        self.multiply(x, out, self.chosen.get(_power_of_two(len(x))))
        return out

    def multiply(self, x: Tensor, out: Tensor, tile: TileConfig | None) -> None:
        """x [num_rows, in_features] -> out [num_rows, num_columns], by the Triton kernel with tile size `tile`; if `tile` is
        None, by the library."""
        if tile is not None:
            self.weight.multiply(x, self.bias, out, tile, self.scratch, gate=self.gate)
        elif self.gate is not None:
            both = out.new_empty((len(x), self.weight.shape[0]))
            self.weight.multiply_by_library(x, self.bias, both)
            multiply_gate(both, out, self.gate)
        else:
            self.weight.multiply_by_library(x, self.bias, out)


def tune(
    layers: Sequence[TunedLinear],
    max_num_rows: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    min_weight_bytes: int,
) -> list[LinearChoice]:
    """See `LinearMethod.tune`. `dtype`: the dtype of the rows of x. `out_dtype`: the dtype of the results."""
    alike: dict[object, list[TunedLinear]] = {}
    for layer in layers:
        alike.setdefault(layer.key, []).append(layer)
    clock = GraphClock(device)
    store = kept_choices(device)
    kept, measured = store.read(), Choices()
    row_counts = sorted({_power_of_two(num_rows) for num_rows in range(1, min(max_num_rows, MAX_TUNED_ROWS) + 1)})
    choices: list[LinearChoice] = []
    with no_garbage_collection():
        for group in alike.values():
            weight = group[0].weight
            tiles = weight.tiles(clock.num_multiprocessors)
            if not tiles or weight.num_bytes < min_weight_bytes:
                continue
            timed = _more_than_the_cache_holds(group, clock.cache_bytes)
            for num_rows in row_counts:
                x = torch.randn(num_rows, weight.shape[1], dtype=torch.float32, device=device).to(dtype)
                out = torch.empty(num_rows, group[0].num_columns, dtype=out_dtype, device=device)
                name = f"{group[0].key} {dtype} {out_dtype} {num_rows} rows"
                if name in kept and _runs(group[0], x, out, kept[name]):
                    continue
                times = _times(timed, x, out, tiles, clock)
                fastest = min(times, key=times.__getitem__)
                measured[name] = KeptChoice(
                    tile=None if fastest is None else asdict(fastest),
                    microseconds=times[fastest],
                    library_microseconds=times[None],
                )
        agreed = {**kept, **store.agree(measured, kept)}
        for group in alike.values():
            for num_rows in row_counts:
                choice = agreed.get(f"{group[0].key} {dtype} {out_dtype} {num_rows} rows")
                if choice is not None and group[0].weight.num_bytes >= min_weight_bytes:
                    choices.append(_choose(group, num_rows, choice))
                    logger.debug("%s", choices[-1])
    return choices


def _runs(layer: TunedLinear, x: Tensor, out: Tensor, choice: KeptChoice) -> bool:
    """Runs a kept choice once, so that it is compiled. False if it does not run here."""
    try:
        tile = None if choice["tile"] is None else TileConfig(**choice["tile"])
        if tile is not None:
            layer.scratch.reserve(layer.weight.shape[0], len(x), tile)
        layer.multiply(x, out, tile)
    except Exception as error:
        if not (isinstance(error, TypeError) or is_of_the_tile(error)):
            raise
        return False
    return True


def _choose(group: Sequence[TunedLinear], num_rows: int, choice: KeptChoice) -> LinearChoice:
    """Lets the layers of `group`, which are alike, use this choice for `num_rows` rows."""
    tile = None if choice["tile"] is None else TileConfig(**choice["tile"])
    weight = group[0].weight
    if tile is not None:
        group[0].scratch.reserve(weight.shape[0], num_rows, tile)
        for layer in group:
            layer.chosen[num_rows] = tile
    return LinearChoice(
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        num_rows=num_rows,
        way="library" if tile is None else str(tile),
        microseconds=choice["microseconds"],
        library_microseconds=choice["library_microseconds"],
    )


def _times(
    layers: Sequence[TunedLinear], x: Tensor, out: Tensor, tiles: Sequence[TileConfig], clock: "GraphClock"
) -> dict[TileConfig | None, float]:
    """Measures one multiplication, in microseconds, by the library (key None) and with each tile size that runs on this GPU. A
    tile that does not fit its shared memory is tried with fewer stages."""
    layers = [*layers] * -(-_MIN_CALLS // len(layers))
    times: dict[TileConfig | None, float] = {}
    waiting: deque[TileConfig | None] = deque([None, *tiles])
    while waiting:
        tile = waiting.popleft()
        if tile is not None:
            layers[0].scratch.reserve(layers[0].weight.shape[0], len(x), tile)
        try:
            times[tile] = clock.microseconds([partial(layer.multiply, x, out, tile) for layer in layers])
        except Exception as error:
            if not is_of_the_tile(error):
                raise
            if tile is not None and tile.num_stages // 2 >= _MIN_STAGES:
                waiting.appendleft(replace(tile, num_stages=tile.num_stages // 2))
                continue
            logger.warning(
                "the product with a weight of %dx%d does not run in tiles of %s, so these are not used: %r",
                *layers[0].weight.shape,
                tile,
                error,
            )
    return times


def _more_than_the_cache_holds(alike: Sequence[TunedLinear], cache_bytes: int) -> list[TunedLinear]:
    """Returns layers of `alike` for one measurement. If they are used in turn, each weight has left the cache before it is used
    again. If there are too few layers for this, copies of the first layer are added."""
    first = alike[0]
    num_bytes = alike[0].weight.num_bytes
    layers = list(alike[: -(-_MIN_BYTES_READ // num_bytes)])
    num_copies = -(-_CACHES_READ * cache_bytes // num_bytes) - len(layers)
    return layers + [
        TunedLinear(copy.deepcopy(first.weight), first.bias, first.scratch, gate=first.gate) for _ in range(num_copies)
    ]


def _power_of_two(num_rows: int) -> int:
    """`num_rows`, rounded up to a power of two; 0 for 0."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


class GraphClock:
    """Times calls on one GPU between two events. The calls are recorded as a graph: if they were launched one by one, short
    kernels would wait for the host."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.num_multiprocessors = properties.multi_processor_count
        self.cache_bytes = properties.L2_cache_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> float:
        """Returns the average time of one of `calls` on the device. The calls run one after another. This series is repeated,
        and the fastest repetition counts."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _call_all(calls)  # the first calls compile kernels, and may raise
            self._stream.synchronize()
            graph = record_graph(partial(_call_all, calls))
            graph.replay()
            times: list[float] = []
            for _ in range(_REPEATS):
                start, end = (
                    torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    for _ in range(2)
                )
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        graph.reset()
        drop_library_workspaces()  # otherwise the library's memory for each graph would stay allocated
        torch.cuda.empty_cache()
        return 1000 * min(times) / len(calls)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
