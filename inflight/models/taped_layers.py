"""`TapedLayers`: on a CPU, the layers of a stage and the norm behind them in one call of the kernels (kernels/cpu/tape.py)."""

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from inflight.attention.cpu_paged import CpuPagedBackend, CpuPagedMetadata, CpuStateMetadata
from inflight.attention.metadata import AttentionMetadata
from inflight.distributed.shared_collectives import SharedCollectives
from inflight.kernels.cpu.functions import AttentionStep
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.tape import Recorder, Tape
from inflight.layers.attention import Attention
from inflight.layers.context import LayerContext
from inflight.layers.recurrent_state import RecurrentState

logger = logging.getLogger(__name__)

_KV_CACHE = attrgetter("kv_cache")


class TapedLayers:
    """Records the layers in a step, and replays the tape in later steps. There is one tape for each kind of input: with or
    without selected rows, with or without an input that may be None. If a step cannot be replayed, Python computes it.

    The results are equal bit for bit, because a tape calls the same kernels. It saves about 250 Python calls per step. Such a
    call is slow, because the model's weights have pushed Python's data out of the processor's caches. During the whole call the
    interpreter's lock is free for the engine's other threads.

    A tape holds the KV caches and the collectives of its recording. If one of these changes, the tapes are dropped.
    """

    def __init__(self, model: nn.Module, context: LayerContext) -> None:
        self._model, self._group = model, context.tp if context.ep is None else context.ep
        self._cached = [module for module in model.modules() if isinstance(module, Attention | RecurrentState)]
        is_on_kernels = all(isinstance(layer.backend, CpuPagedBackend) for layer in self._cached)
        self._kernels = context.ops.kernels if isinstance(context.ops, CpuLayerOps) and is_on_kernels else None
        self._groups: list[int] = []  # the KV groups of this stage's layers
        self._bound: list[Any] = []  # Any: KV caches and collectives
        self._tapes: dict[tuple[Any, ...], Tape | None] = {}  # None: it cannot be recorded

    def __call__(
        self,
        compute: Callable[[], tuple[Tensor, ...]],
        inputs: Sequence[Tensor | None],
        rows: Tensor | None,
        attn_metadata: tuple[AttentionMetadata, ...],
    ) -> Sequence[Tensor]:
        """Returns the result of `compute`, which computes all layers.

        Args:
            inputs: every tensor of the step that `compute` uses, each [num_tokens, ...]. None is an input that is missing. As
                `compute` would, this may change them.
            rows: int64 [num_rows], the tokens that `compute` selects with `LayerOps.select_rows`.
        """
        collectives, tensors = self._group.collectives, [tensor for tensor in inputs if tensor is not None]
        num_tokens = len(tensors[0])
        shares_memory = self._group.size == 1 or isinstance(collectives, SharedCollectives)
        if self._kernels is None or not shares_memory or not num_tokens or not all(x.is_contiguous() for x in tensors):
            return compute()
        bound = [*map(_KV_CACHE, self._cached), collectives]
        if len(bound) != len(self._bound) or not all(map(is_, bound, self._bound)):
            self._tapes, self._bound = {}, bound
            self._groups = sorted({layer.group_index for layer in self._cached})
        steps = [_step_of(attn_metadata[group], num_tokens) for group in self._groups]
        key = (rows is None, *(None if tensor is None else tensor.dtype for tensor in inputs))
        if key in self._tapes:
            tape = self._tapes[key]
            run = collectives.run if isinstance(collectives, SharedCollectives) else _run_alone
            return compute() if tape is None else tape.replay(tensors, rows, steps, run)
        if rows is not None and not len(rows):
            return compute()  # a recording needs rows
        caches = [cache for cache in bound if isinstance(cache, Tensor)]
        with Recorder(self._kernels, tensors, rows, steps, [*self._model.parameters(), *caches]) as recorder:
            results = compute()
        self._tapes[key] = recorder.finish(results)
        if recorder.refusal is not None:
            logger.info("Python computes each layer of a step, which is slower than a tape: %s", recorder.refusal)
        return results


def _run_alone(call: Callable[[], int]) -> None:
    status = call()
    assert status == 0, status


def _step_of(metadata: AttentionMetadata, num_tokens: int) -> AttentionStep:
    assert isinstance(metadata, CpuPagedMetadata | CpuStateMetadata), metadata  # otherwise it is another backend's
    assert num_tokens == metadata.num_tokens, metadata
    return metadata.step
