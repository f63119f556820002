"""`RecurrentState`: what a recurrent layer keeps between steps. It is the counterpart of `Attention`'s KV cache."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import StatePlace
from inflight.interface.kv_cache import KVCacheSpec

_ALIGNMENT = 64  # bytes


class RecurrentState(nn.Module):
    """The tensors that say all that a layer remembers of a sequence, in a block of the arena.

    The worker calls `kv_cache_spec`, allocates the cache and calls `bind`. Only then can the layer run.

    Attributes:
        offsets: where each tensor begins in the bytes of a block, and where the last one ends.
    """

    def __init__(
        self,
        layer_name: str,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.backend = backend
        self._shapes = tuple(shapes)
        self._dtypes = tuple(dtypes)
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        self.offsets = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        self.kv_cache: Tensor | None = None
        self.group_index = 0

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype, num_states: int = 1) -> KVCacheSpec:
        """`dtype`, that of keys and values, has no influence on a state."""
        return KVCacheSpec.of_state(block_size, self.offsets[-1], num_states)

    def bind(self, kv_cache: Tensor | None, group_index: int) -> None:
        """`kv_cache`: uint8 [num_blocks, block_bytes], this layer's part of the arena. `group_index`: the layer's KV group."""
        self.kv_cache = kv_cache
        self.group_index = group_index

    def tensors(self, place: StatePlace) -> list[Tensor]:
        """Views of the tensors of a state."""
        assert self.kv_cache is not None, f"{self.layer_name} has no cache yet"
        found = []
        state = self.kv_cache[place.block, place.number * self.offsets[-1] :]
        for shape, dtype, start in zip(self._shapes, self._dtypes, self.offsets, strict=False):
            size = math.prod(shape) * dtype.itemsize
            found.append(state[start : start + size].view(dtype).view(shape))
        return found
