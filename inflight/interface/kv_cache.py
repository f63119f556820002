"""The shape of the KV cache. The control plane uses it to count blocks, and the workers use it to place the bytes.

A model may have layers with different specs, for example with and without a sliding window. All layers of a KV group have the
same spec and share a block table. A group has at most as many layers as the rarest spec, so the layers of a more frequent spec
may form several groups. The cache of a rank is one array of bytes, the arena `[num_blocks, block_bytes]`. A block belongs to
one group at a time. It holds `block_size` tokens of every layer of this group, contiguously:

    block  | layer 0 | layer 1 | ... | layer L-1 | (padding up to block_bytes)

All groups have the same `block_bytes`, so one pool of block ids serves all of them. Block 0 is the dummy block. No request gets
it. If a batch is padded with rows that belong to no request, these rows write to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

DUMMY_BLOCK = 0

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The cache of one attention layer. `sliding_window`: how many tokens a query sees, including its own; None for all."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int  # bytes of one element
    scale_bytes: int = 0  # bytes of scales for one head and one token, if the elements are integers
    sliding_window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * (self.head_dim * self.itemsize + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this one layer."""
        return self.block_size * self.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """Layers of one rank that share a block table. All have the same spec. A pipeline stage may have no layer of a group."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The cache of one rank: `num_blocks` blocks (including the dummy block) of `block_bytes` bytes each."""

    num_blocks: int
    block_bytes: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def count_groups(kinds: Iterable[Kind]) -> dict[Kind, int]:
    """Returns how many groups each kind of layer forms. Layers with equal specs are of one kind. A group has at most as many
    layers as the rarest kind has.

    Args:
        kinds: the kind of every layer of the whole model, all pipeline stages included.
    """
    count_of_kind = Counter(kinds)
    size = min(count_of_kind.values())
    return {kind: -(-count // size) for kind, count in count_of_kind.items()}
