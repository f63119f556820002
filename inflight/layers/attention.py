"""`Attention`: the attention of one layer. It holds the layer's KV cache and calls the attention backend."""

import torch
from torch import Tensor, nn

from inflight.attention.backend import AttentionBackend, AttentionParams, HeadNorm, LayerCache, Rotation
from inflight.attention.metadata import AttentionMetadata
from inflight.interface.kv_cache import KVCacheSpec


class Attention(nn.Module):
    """Causal attention of this rank's heads.

    The worker calls `kv_cache_spec`, allocates the cache and calls `bind`. Only then can `forward` run. With an `owner`, this
    layer has no cache of its own: it reads the owner's.
    """

    def __init__(
        self,
        layer_name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        params: AttentionParams,
        backend: AttentionBackend,
        owner: "Attention | None" = None,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.params, self.backend = params, backend
        self.kv_cache: Tensor | None = None
        self.group_index = 0
        self.owns_cache = owner is None
        self.readers: list[Attention] = []  # those whose owner this is
        if owner is not None:
            owner.readers.append(self)

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype, num_states: int = 1) -> KVCacheSpec:
        """Describes this layer's KV cache. `dtype`: the cache's dtype. A cache of integers has one float32 scale per head and
        token. `num_states` is for recurrent layers."""
        return KVCacheSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            scale_bytes=0 if dtype.is_floating_point else torch.float32.itemsize,
            has_values=self.params.value_dim is None,
            sliding_window=self.params.sliding_window,
        )

    def bind(self, kv_cache: Tensor | None, group_index: int) -> None:
        """`kv_cache`: this layer's part of the memory of all KV caches. `group_index`: the layer's KV group. The layers of one
        group share a block table and attention metadata."""
        self.kv_cache, self.group_index = kv_cache, group_index
        for reader in self.readers:
            reader.bind(kv_cache, group_index)

    def forward(
        self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, attn_metadata: tuple[AttentionMetadata, ...]
    ) -> Tensor:
        """heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries first -> [num_tokens, num_heads, head_dim]. If
        the cache is another layer's, `heads` has only the queries, and `num_kv_heads` is still the number in the cache.

        Queries and keys are normed and rotated, key and value are written to the cache. `attn_metadata`: one per KV group.
        `heads` may be changed.
        """
        return self.backend.attend(heads, rotation, norm, self._cache(attn_metadata), num_heads=self.num_heads)

    def forward_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: tuple[AttentionMetadata, ...]
    ) -> Tensor:
        """The same for queries and keys that are normed and rotated already: query [num_tokens, num_heads, head_dim], key and
        value [num_tokens, num_kv_heads, head_dim] -> [num_tokens, num_heads, head_dim]. If values are elements of the keys,
        `value` has no heads, and the result has value_dim instead of head_dim."""
        return self.backend.forward(query, key, value, self._cache(attn_metadata))

    def _cache(self, attn_metadata: tuple[AttentionMetadata, ...]) -> LayerCache:
        assert self.kv_cache is not None, f"{self.layer_name} has no KV cache yet"
        return LayerCache(self.kv_cache, attn_metadata[self.group_index], self.params)
