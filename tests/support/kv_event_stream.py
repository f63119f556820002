"""The events of prefix caches, as subscribers of vLLM read them since 0.24: events are maps, the batch is an array."""

from __future__ import annotations

import msgspec
import zmq

MILLISECONDS = 120_000  # a test that waits so long has failed


class KVCacheEvent(msgspec.Struct, tag=True):
    """The base class."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlocksRemoved(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlocksRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, replica: int = 0, *, max_waiting: int = 1000
) -> zmq.Socket[bytes]:
    """`max_waiting`: messages that may wait until they are read; 0: any number."""
    opened = context.socket(kind)
    opened.setsockopt(zmq.RCVHWM, max_waiting)
    opened.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
    port = int(endpoint.rpartition(":")[2]) + replica
    opened.connect(f"tcp://127.0.0.1:{port}")
    return opened
