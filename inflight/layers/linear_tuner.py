"""`LinearTuner`: which kernel, in which tiles, computes a product with few rows on a GPU: what was measured fastest.

Measured once, at start-up, on the weights of the model itself; afterwards a choice is looked up.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inflight.device.accelerator import no_garbage_collection
from inflight.kernels.triton.activation import silu_and_mul
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig, is_of_the_tile
from inflight.layers.linear_method import LinearChoice

logger = logging.getLogger(__name__)

_Key = tuple[str, bool, int, int]

MIN_WEIGHT_BYTES = 1 << 20  # of a weight worth its measurements
MAX_TUNED_ROWS = 64  # beyond, the weights are no longer what a product waits for
_MIN_CALLS = 8  # of one measurement
_MIN_BYTES_READ = 256 << 20  # by one measurement, where there is as much
_CACHES_READ = 2  # times the cache's size is read between two uses of a weight, so that it is never cached
_REPEATS = 4


class Product(ABC):
    """x @ weight.T with one weight, which is on the device.

    Attributes:
        kind: of the weight's elements; products of one kind and shape, with a gate or without, are equally fast.
        shape: (out_features, in_features).
        num_bytes: of the weight as it is read.
        is_gated: the result is silu(first half of the features) * second half.
    """

    kind: str
    shape: tuple[int, int]
    num_bytes: int
    is_gated: bool

    @property
    def num_columns(self) -> int:
        """Of a result."""
        return self.shape[0] // 2 if self.is_gated else self.shape[0]

    @property
    def key(self) -> _Key:
        """Of all that are equally fast."""
        return self.kind, self.is_gated, *self.shape

    @abstractmethod
    def configs(self, num_multiprocessors: int) -> list[TileConfig]:
        """What is worth measuring against the library."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, config: TileConfig, scratch: SplitKScratch) -> None:
        """x [num_rows, in_features], at most `MAX_TUNED_ROWS` rows -> out [num_rows, num_columns]."""

    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The same for any number of rows."""
        if self.is_gated:
            both = out.new_empty((len(x), self.shape[0]))
            self.all_features_by_library(x, bias, both)
            silu_and_mul(both, out)
        else:
            self.all_features_by_library(x, bias, out)

    @abstractmethod
    def all_features_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [num_rows, in_features] -> out [num_rows, out_features], before the gate."""

    @abstractmethod
    def copy(self) -> Product:
        """With the weight in other memory."""


class Clock(Protocol):
    """Measures on one GPU.

    Attributes:
        num_multiprocessors, cache_bytes: of that GPU.
    """

    num_multiprocessors: int
    cache_bytes: int

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> float:
        """Device time of one of these calls, which run one after another; the least of several runs."""


class GraphClock:
    """By events around the calls, recorded as a graph: launched one by one, short kernels would wait for the host."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.num_multiprocessors, self.cache_bytes = properties.multi_processor_count, properties.L2_cache_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> float:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for call in calls:  # compiles, and may raise
                call()
            self._stream.synchronize()
            graph = self._recorded(calls)
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
        torch._C._cuda_clearCublasWorkspaces()  # else what the library and each graph allocated would be kept for nobody
        torch.cuda.empty_cache()
        return 1000 * min(times) / len(calls)

    def _recorded(self, calls: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


class LinearTuner:
    """All products of one linear method, which run one after another on one stream.

    Args:
        dtype, out_dtype: of rows and results.
        make_clock: called when something is to be measured.
        min_weight_bytes: smaller weights are left to the library.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        make_clock: Callable[[], Clock],
        *,
        min_weight_bytes: int,
    ) -> None:
        self._min_weight_bytes = min_weight_bytes
        self._device, self._dtype, self._out_dtype, self._make_clock = device, dtype, out_dtype, make_clock
        self._alike: dict[_Key, list[Product]] = {}
        self._chosen: dict[tuple[_Key, int], TileConfig] = {}
        self._scratch: SplitKScratch | None = None

    def add(self, product: Product) -> None:
        self._alike.setdefault(product.key, []).append(product)

    def multiply(self, product: Product, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [num_rows, in_features] -> out [num_rows, num_columns], in the way that was found fastest; the library's, as long
        as nothing was measured."""
        config = None
        if 0 < len(x) <= MAX_TUNED_ROWS:
            config = self._chosen.get((product.key, _bucket(len(x))))
        if config is None:
            product.multiply_by_library(x, bias, out)
        else:
            assert self._scratch is not None
            product.multiply(x, bias, out, config, self._scratch)

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        """See `LinearMethod.tune`."""
        tuned: list[LinearChoice] = []
        clock = self._make_clock()
        self._scratch = self._scratch or SplitKScratch(self._device)
        buckets = sorted({_bucket(num_rows) for num_rows in range(1, min(max_num_rows, MAX_TUNED_ROWS) + 1)})
        with no_garbage_collection():
            for products in self._alike.values():
                configs = products[0].configs(clock.num_multiprocessors)
                if configs and products[0].num_bytes >= self._min_weight_bytes:
                    distinct = _uncached(products, clock.cache_bytes)
                    tuned += [self._choose(distinct, configs, num_rows, clock, self._scratch) for num_rows in buckets]
        for choice in tuned:
            logger.debug("%s", choice)
        return tuned

    def _choose(
        self,
        products: Sequence[Product],
        configs: Sequence[TileConfig],
        num_rows: int,
        clock: Clock,
        scratch: SplitKScratch,
    ) -> LinearChoice:
        out_features, in_features = products[0].shape
        x = torch.randn(num_rows, in_features, device=self._device).to(self._dtype)
        out = torch.empty(num_rows, products[0].num_columns, dtype=self._out_dtype, device=self._device)
        products = [*products] * -(-_MIN_CALLS // len(products))
        by_library = clock.microseconds([partial(product.multiply_by_library, x, None, out) for product in products])
        best, least = None, by_library
        for config in configs:
            scratch.reserve(out_features, num_rows, config)
            try:
                time = clock.microseconds(
                    [partial(product.multiply, x, None, out, config, scratch) for product in products]
                )
            except Exception as error:
                if not is_of_the_tile(error):
                    raise
                logger.warning("%dx%d in tiles of %s does not run: %r", out_features, in_features, config, error)
                continue
            if time < least:
                best, least = config, time
        if best is not None:
            self._chosen[products[0].key, num_rows] = best
        return LinearChoice(
            out_features=out_features,
            in_features=in_features,
            num_rows=num_rows,
            way="library" if best is None else str(best),
            microseconds=least,
            library_microseconds=by_library,
        )


def _uncached(products: Sequence[Product], cache_bytes: int) -> list[Product]:
    """To be computed one after another: so many that none is in the cache when its turn comes, copies where a model has few."""
    num_bytes = products[0].num_bytes
    distinct = list(products[: -(-_MIN_BYTES_READ // num_bytes)])
    copies = -(-_CACHES_READ * cache_bytes // num_bytes) - len(distinct)
    return distinct + [products[0].copy() for _ in range(copies)]


def _bucket(num_rows: int) -> int:
    """The next power of two."""
    return 1 << (num_rows - 1).bit_length()
