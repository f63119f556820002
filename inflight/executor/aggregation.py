"""Merges what all ranks answer to one step into one `ModelRunnerOutput`.

Owns, in `KVConnectorAggregator`, the reports that not every rank has made yet: they outlive the step they came with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput

_NOTHING = KVConnectorOutput()


class KVConnectorAggregator:
    """Rank sets of the KV connectors' reports.

    A request has finished sending (or receiving) when every rank has said so, in this step or in an earlier one. A block that
    failed on one rank has failed. `add` is commutative and idempotent: the state is sets, and no count of anything.
    Not thread-safe.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[
            str, set[int]
        ] = {}  # request id -> ranks that have finished, never all of them after `take`
        self._receiving: dict[str, set[int]] = {}
        self._failed_block_ids: set[int] = set()

    def add(self, rank: int, output: KVConnectorOutput) -> None:
        assert 0 <= rank < self._num_ranks
        _note(self._sending, rank, output.finished_sending)
        _note(self._receiving, rank, output.finished_receiving)
        self._failed_block_ids |= output.failed_block_ids

    @property
    def has_reports(self) -> bool:
        return bool(self._sending or self._receiving or self._failed_block_ids)

    def take(self) -> KVConnectorOutput:
        """Everything complete since the last call, each report once."""
        if not self.has_reports:
            return _NOTHING
        failed_block_ids = frozenset(self._failed_block_ids)
        self._failed_block_ids.clear()
        return KVConnectorOutput(
            finished_sending=self._take_complete(self._sending),
            finished_receiving=self._take_complete(self._receiving),
            failed_block_ids=failed_block_ids,
        )

    def _take_complete(self, reports: dict[str, set[int]]) -> frozenset[str]:
        complete = frozenset(request_id for request_id, ranks in reports.items() if len(ranks) == self._num_ranks)
        for request_id in complete:
            del reports[request_id]
        return complete


def _note(reports: dict[str, set[int]], rank: int, request_ids: Iterable[str]) -> None:
    for request_id in request_ids:
        reports.setdefault(request_id, set()).add(rank)


def merge_outputs(
    outputs: Mapping[int, ModelRunnerOutput], output_rank: int, aggregator: KVConnectorAggregator
) -> ModelRunnerOutput:
    """One output for the step: everything sampled comes from `output_rank`, the KV connectors' reports from all ranks."""
    for rank, output in outputs.items():
        aggregator.add(rank, output.kv_connector_output)
    output, merged = outputs[output_rank], aggregator.take()
    if output.kv_connector_output == merged:  # every step without a KV connector
        return output
    return replace(output, kv_connector_output=merged)
