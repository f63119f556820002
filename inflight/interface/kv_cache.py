"""The shape of the KV cache. The control plane uses it to count blocks, and the workers use it to place the bytes.

A model may have layers with different specs, for example with and without a sliding window, or with a recurrent state. All
layers of a KV group have the same spec and share a block table. The layers of a frequent spec may form several groups, so that
a block needs about as many bytes in every group. The cache of a rank is one array of bytes, the arena `[num_blocks,
block_bytes]`. A block belongs to one group at a time. It holds `block_size` tokens of every layer of this group, contiguously:

    block  | layer 0 | layer 1 | ... | layer L-1 | (padding up to block_bytes)

All groups have the same `block_bytes`, so one pool of block ids serves all of them. Block 0 is the dummy block. No request gets
it. If a batch is padded with rows that belong to no request, these rows write to it.

In a group of recurrent layers, a block holds the state of every layer after one token: the newest computed token among the
`block_size` tokens to which the block belongs (with drafts: after several tokens, see `KVCacheSpec`).
Few of a sequence's entries have a block; the others are the dummy block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

DUMMY_BLOCK = 0


# The blocks of a sequence in a group of recurrent layers: the one of the state after the last full block, and two to which a
# step writes, if it ends in the second one. Refused drafts can leave one more. A request that then finds no block is preempted.
STATE_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The cache of one layer.

    `has_values`: if it is not set, values are the first elements of the keys, and only keys are stored.
    `sliding_window`: how many tokens a query sees, including its own; None for all. `state_bytes` is above 0 for a recurrent
    layer: the bytes of its state. Then there are no heads, and the window is 2, because a token needs the block of the token
    before it. A block of a recurrent layer has `num_states` states: the state after the token at position p is number
    `p % num_states`. In an engine with drafts (guessed tokens) these are the states after the last tokens, because only the
    next step knows after which of them the sequence goes on.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int  # bytes of one element
    scale_bytes: int = 0  # bytes of scales for one head and one token, if the elements are integers
    has_values: bool = True
    sliding_window: int | None = None
    state_bytes: int = 0
    num_states: int = 1

    @classmethod
    def of_state(cls, block_size: int, state_bytes: int, num_states: int = 1) -> KVCacheSpec:
        """The spec of a recurrent layer."""
        return cls(
            block_size=block_size,
            num_kv_heads=0,
            head_dim=0,
            dtype="uint8",
            itemsize=1,
            sliding_window=2,
            state_bytes=state_bytes,
            num_states=num_states,
        )

    @property
    def is_state(self) -> bool:
        return self.state_bytes > 0

    @property
    def num_cells(self) -> int:
        """For each key head: its keys, and its values."""
        return 2 if self.has_values else 1

    @property
    def bytes_per_token(self) -> int:
        return self.num_cells * self.num_kv_heads * (self.head_dim * self.itemsize + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this one layer."""
        return self.state_bytes * self.num_states or self.block_size * self.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """Layers of one rank that share a block table. All have the same spec. A pipeline stage may have no layer of a group."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The cache of one rank: `num_blocks` blocks (including the dummy block) of `block_bytes` bytes each. Beside this arena the
    rank has a host pool in host memory, with `num_slots` blocks more. `contents` is a digest of everything that determines
    the bytes of a block on all ranks, such as the weights; b"" if blocks are not kept outside of this engine. A request
    always has blocks for `num_ahead_tokens` more than a step computes, because a draft model writes there."""

    num_blocks: int
    block_bytes: int
    groups: tuple[KVCacheGroup, ...]
    num_slots: int = 0
    contents: bytes = b""
    num_ahead_tokens: int = 0

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """How many tokens of one sequence fit into the KV cache if no layer has a sliding window."""
        num_states = sum(group.spec.is_state for group in self.groups)
        num_blocks = max(0, self.num_blocks - 1 - STATE_BLOCKS * num_states)
        return num_blocks // max(1, len(self.groups) - num_states) * self.groups[0].spec.block_size


def count_groups(specs: Iterable[KVCacheSpec]) -> dict[KVCacheSpec, int]:
    """Returns how many groups each kind of layer forms. Layers with equal specs are of one kind.

    The block that all groups share has room for as many layers of each kind of attention as the rarest kind of attention has.
    A group has as many layers as fit into this block, but at least one.

    Args:
        specs: of every layer of the whole model, all pipeline stages included.
    """
    num_layers = Counter(specs)
    attention = {spec: count for spec, count in num_layers.items() if not spec.is_state}
    size = min(attention.values(), default=1)
    block_bytes = size * max(spec.block_bytes for spec in attention or num_layers)
    return {spec: -(-count // max(1, block_bytes // spec.block_bytes)) for spec, count in num_layers.items()}
