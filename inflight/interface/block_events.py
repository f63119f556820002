"""What a replica tells routers outside of Inflight about its prefix cache, in the format of vLLM's events."""

from __future__ import annotations

from msgspec import Struct


class BlockStored(Struct, tag=True, kw_only=True):
    """Blocks joined the cache. Each one continues the block before it.

    Attributes:
        block_hashes: the first 8 bytes of the name of each block, as numbers.
        parent_block_hash: of the block that the first one continues; None if it is the first of a prompt.
        token_ids: the tokens of all these blocks.
        medium: where the blocks are. Always "GPU", which means the memory that the model computes with.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = "GPU"
    lora_name: None = None


class BlockRemoved(Struct, tag=True, kw_only=True):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(Struct, tag=True, kw_only=True):
    """The cache is empty."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
