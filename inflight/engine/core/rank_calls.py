"""`RankCalls`: calls the ranks' methods for transfers of KV blocks, while steps go on."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from inflight.executor.step_protocol import StepProtocol
from inflight.interface.worker import TierCounts


class RankCalls:
    """The `TransferCalls` of an executor's ranks. If a rank is lost, or an epoch begins, the futures fail."""

    def __init__(self, executor: StepProtocol) -> None:
        self._executor = executor

    def save(
        self, transfer_id: int, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[Sequence[bytes]]
    ) -> Future[list[bool]]:
        return self._call("kv_save", transfer_id, blocks, slots, keys)

    def stored(self, transfer_id: int) -> Future[list[tuple[bool, TierCounts]]]:
        return self._call("kv_stored", transfer_id)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Future[list[bool]]:
        return self._call("kv_load", slots, blocks)

    def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], chunks: Sequence[tuple[bytes, int]]
    ) -> Future[list[tuple[list[bool], TierCounts]]]:
        return self._call("kv_fetch", keys, slots, chunks)

    def touch(self, keys: Sequence[Sequence[bytes]]) -> Future[list[tuple[list[bool], TierCounts]]]:
        return self._call("kv_touch", keys)

    def restore(self, keys: Sequence[Sequence[bytes]], slots: Sequence[int]) -> Future[list[tuple[bool, TierCounts]]]:
        return self._call("kv_restore", keys, slots)

    def _call(self, method: str, *args: Any) -> Future[Any]:  # Any: each method has its own arguments and result
        future: Future[Any] = self._executor.collective_rpc(method, args, non_block=True, beside=True)
        return future
