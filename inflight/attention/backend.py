"""`AttentionBackend`: paged attention for one kind of device. `Rotation`: the rotary embedding of a step's tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.attention.metadata import AttentionInputs, AttentionMetadata, StateMetadata
from inflight.device.base import TORCH_DTYPES
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.layer_ops import LayerOps


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The constants of a layer's attention: scale, sliding window, soft cap, sinks, direction, position bias. They are the same
    in all steps.

    A score is `scale * (query . key)`. With a `soft_cap` c, a score x becomes `c * tanh(x / c)`. Then keys that the query does
    not see are masked. With `sinks`, each query head has one more logit: it adds `exp(sink)` to the denominator of the softmax,
    and it has no value. With a `position_bias` of radius r, the score of the key at position k for the query at position q
    gets `position_bias[head, r + d]` more, where d is k - q, or -r or r if it is less or more than that.
    """

    scale: float  # above 0
    sliding_window: int | None = None  # how many tokens a query sees, including its own; None: all
    soft_cap: float | None = None  # above 0; None: scores are not capped
    sinks: Tensor | None = None  # float32 [num_heads], contiguous, of this rank's heads, on the device; None: no sinks
    value_dim: int | None = None  # values are the first so many elements of the keys; None: they are stored
    is_causal: bool = True  # False: a query also sees the tokens behind it, whose keys must be written in the same step
    # whether a query of an image's token also sees the tokens behind it, up to the end of the image; see
    # `AttentionMetadata.with_ends`
    sees_whole_images: bool = False
    # float32 [num_heads, 2 * radius + 1], contiguous, of this rank's heads, on the device; None: positions add nothing
    position_bias: Tensor | None = None


class HeadNorm(Protocol):
    """An RMSNorm of each query head and key head over its head_dim elements (`layers.qk_norm.QKNorm`)."""

    @property
    def weight(self) -> Tensor:
        """[num_heads + num_kv_heads, head_dim], queries first."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of one step's tokens: [num_tokens, head_dim] in the engine's dtype, for all layers.

    `sin` has negated sines in the first half of the head, because there the rotation subtracts: x1 * cos - x2 * sin.
    """

    cos: Tensor
    sin: Tensor
    ops: LayerOps
    query_scale: Tensor | None = None  # float32 [num_tokens, 1], the factors of the queries; None: they are 1
    changes_nothing: bool = False  # all angles are 0

    @property
    def tensors(self) -> list[Tensor]:
        return [self.cos, self.sin] if self.query_scale is None else [self.cos, self.sin, self.query_scale]

    def split(self) -> list["Rotation"]:
        """The rotation of each token alone."""
        scales = repeat(None) if self.query_scale is None else self.query_scale[:, None]
        others = repeat(self.ops), scales, repeat(self.changes_nothing)
        return list(map(Rotation, self.cos[:, None], self.sin[:, None], *others))

    def apply(self, heads: Tensor, norm: HeadNorm | None) -> Tensor:
        """Returns `heads` after the norm (if there is one) and the rotation. May overwrite `heads`, which has the shape
        [num_tokens, num_heads + num_kv_heads, head_dim], queries first."""
        if self.changes_nothing and norm is None:
            return heads
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return self.ops.norm_and_rotate(heads, weight, eps, self.cos, self.sin)


class LayerStep(NamedTuple):
    """What all layers of a stage read in a step.

    Attributes:
        rotations: one for each kind of rotary embedding.
        attn_metadata: one for each KV group.
        token_inputs: see `TokenInputs`; None if the model has none.
        captured: see `ModelStep`.
    """

    rotations: tuple[Rotation, ...]
    attn_metadata: tuple[AttentionMetadata, ...]
    token_inputs: Tensor | None = None
    captured: Tensor | None = None


class LayerCache(NamedTuple):
    """Where and how a layer's attention reads and writes in a step.

    Attributes:
        kv_cache: this layer's `kv_cache_view`.
        metadata: this step's metadata, built by this backend for the layer's KV group.
        params: the layer's constants. `sliding_window` is the same as in the spec from which the metadata was built.
    """

    kv_cache: Tensor
    metadata: AttentionMetadata
    params: AttentionParams


MetadataBuilder = Callable[[AttentionInputs], AttentionMetadata]


class AttentionBackend(ABC):
    """Reads and writes the KV cache of attention layers.

    The methods are called in this order:

    1. At start-up the worker calls `kv_cache_view` once per layer. The view shares the memory of the arena (the tensor
       with all KV blocks of this rank).
    2. Once per step and KV group `ModelRunner` calls `build_metadata`, on any thread. The method reads no device memory
       and keeps no reference to the arrays of its inputs. So the caller may reuse these arrays after the call.
       (`GraphModelRunner` makes the metadata itself, from its device state.)
    3. In each step the model calls `attend` once per layer, unless a tape computes all layers in one call. By default
       `attend` calls `forward`. All forwards of a backend run one after the other, in step order, on the device's compute
       thread or stream. So a backend may keep temporary memory and use it again in the next forward.

    A query at position p sees exactly the keys at `[max(0, p - sliding_window + 1), p]` of its own sequence; if the layer is
    not causal, up to `min(p + sliding_window, seq_len) - 1`; if it sees whole images, up to the end that `with_ends` has given
    the token. Other bytes of the arena (blocks of other sequences, blocks in
    stale entries of the block table, the rest of the last block) never influence the result, even if they are NaN. Code that
    fills a block without `forward` (a KV connector) must fill the whole block.
    """

    is_batch_invariant = False  # whether a row's result is the same, bit for bit, in every batch

    def layer_cache(self, arena: torch.Tensor, spec: KVCacheSpec, layer_index: int) -> torch.Tensor:
        """Returns a layer's part of the arena: its `kv_cache_view`, or uint8 [num_blocks, block_bytes] for a state."""
        if spec.is_state:
            start = layer_index * spec.block_bytes
            return arena[:, start : start + spec.block_bytes]
        return self.kv_cache_view(arena, spec, layer_index)

    def metadata_builder(self, spec: KVCacheSpec) -> MetadataBuilder:
        """Returns the function that makes the data of a step for the layers of a KV group, attention or recurrent."""
        return partial(self.build_state_metadata if spec.is_state else self.build_metadata, spec=spec)

    def kv_cache_view(self, arena: torch.Tensor, spec: KVCacheSpec, layer_index: int) -> torch.Tensor:
        """Returns one layer's cache: a typed, strided view of `arena` (uint8, `[num_blocks, block_bytes]`), not a copy.

        `layer_index` is the layer's position in its KV group. Dimension 0 of the view is the block. A backend may have its own
        layout. This one is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`: first keys, then values, if they are
        stored.
        """
        layer = bytes_of_layer(arena, spec, layer_index)
        return layer.view(len(arena), spec.num_cells, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def scratch_bytes(self, spec: KVCacheSpec, *, per_head: int, num_threads: int) -> int:
        """Returns the most bytes of device memory for temporary data of the backend. The backend keeps them between steps.

        Args:
            per_head: the number of query heads per key head.
            num_threads: on a CPU, the number of threads that compute a step.
        """
        return 0

    def build_state_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> StateMetadata:
        """The same as `build_metadata`, for recurrent layers."""
        num_tokens = int(inputs.query_start_loc[-1])
        return StateMetadata(
            num_tokens=num_tokens, inputs=copied(inputs), block_size=spec.block_size, num_states=spec.num_states
        )

    @abstractmethod
    def build_metadata(self, inputs: AttentionInputs, spec: KVCacheSpec) -> AttentionMetadata:
        """Makes the data of a step that the layers of a KV group share, such as the places to which keys and values are
        written. Does not wait for the device."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """Writes `key` and `value` to the cache, then attends.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, already rotated for its position, in the model's dtype.
            key, value: `[num_tokens, num_kv_heads, head_dim]`. Query head h reads key head h // (num_heads / num_kv_heads).
                With 0 heads: another layer has written the step's keys and values to this cache. If values are elements of
                the keys, `value` has 0 heads.

        Returns:
            `[num_tokens, num_heads, head_dim]`, or `value_dim` in place of head_dim; contiguous, in new memory.
        """

    def attend(
        self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, cache: LayerCache, *, num_heads: int
    ) -> Tensor:
        """Norms and rotates queries and keys, then calls `forward`.

        Args:
            heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: first queries, then keys, then values, as a fused
                projection returns them. This method may overwrite them.
            rotation: the rotary embedding of this step's tokens.
            norm: the layer's norm of queries and keys, or None.
        """
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query_key = rotation.apply(heads[:, : num_heads + num_kv_heads], norm)
        value = heads[:, num_heads + num_kv_heads :]
        return self.forward(query_key[:, :num_heads], query_key[:, num_heads:], value, cache)


def copied(inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs in new memory, contiguous."""
    return AttentionInputs(
        query_start_loc=np.array(inputs.query_start_loc, dtype=np.int32),
        seq_lens=np.array(inputs.seq_lens, dtype=np.int32),
        num_computed_tokens=np.array(inputs.num_computed_tokens, dtype=np.int32),
        block_table=np.array(inputs.block_table, dtype=np.int32, order="C"),
    )


def bytes_of_layer(arena: torch.Tensor, spec: KVCacheSpec, layer_index: int) -> torch.Tensor:
    """Returns the `spec.block_bytes` bytes that a layer has in each block of the arena, in the cache's dtype."""
    start = layer_index * spec.block_bytes
    return arena[:, start : start + spec.block_bytes].view(TORCH_DTYPES[spec.dtype])
