"""What a replica tells routers outside of Inflight about its prefix cache: a map in the format of vLLM's events.

{"type": "BlockStored", ...}        blocks joined the cache, each one after the one before it
    "block_hashes"                  the first 8 bytes of the name of each block, as numbers
    "parent_block_hash"             the block before the first of them; None if there is none
    "token_ids", "block_size"       the tokens of all these blocks, and how many each has
    "medium"                        always "GPU", which means the memory that the model computes with
    "lora_id", "lora_name"          always None
    "extra_keys"                    for each block: what its name depends on beside its tokens: the SHA-256 of each image that
                                    has tokens in it, and where the image begins, counted from the block's first token; or
                                    None if there are no images
{"type": "BlockRemoved", ...}       blocks left the cache: "block_hashes", "medium"
{"type": "AllBlocksCleared"}        the cache is empty
"""

from collections.abc import Sequence

ExtraKey = list[str | int]
BlockEvent = dict[str, str | int | list[int] | list[list[ExtraKey] | None] | None]
CLEARED: BlockEvent = {"type": "AllBlocksCleared"}


def blocks_stored(
    number: int, parent: int | None, token_ids: list[int], extra_keys: Sequence[ExtraKey] = ()
) -> BlockEvent:
    """One block joined the cache."""
    event: BlockEvent = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": parent}
    return {
        **event,
        "token_ids": token_ids,
        "block_size": len(token_ids),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [list(extra_keys) or None],
    }


def blocks_removed(numbers: Sequence[int]) -> BlockEvent:
    return {"type": "BlockRemoved", "block_hashes": list(numbers), "medium": "GPU"}
