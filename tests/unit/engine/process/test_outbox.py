"""`Outbox`: what a front end does not read is merged."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from inflight.engine.core.step_clock import MAX_GAPS
from inflight.engine.process import outbox as outbox_module
from inflight.engine.process.outbox import Outbox, merge_stats
from inflight.interface.request import EngineCoreOutput, FinishReason, LogprobsColumns
from inflight.interface.serving import CachedBlocks, EngineOutputs
from inflight.interface.statistics import SchedulerStats, StepCounts, TransferCounts
from inflight.processes.streams import BlockingStream
from tests.unit.engine.process.core_process_cases import stats


def test_an_outbox_merges_what_its_front_end_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(BlockingStream(ours), "outbox")
    count, sequences = 3000, 8
    for step in range(count):
        outputs = []
        for i in range(sequences):
            columns = LogprobsColumns(
                token_ids=np.full((1, 1), step, np.int32),
                logprobs=np.zeros((1, 1), np.float32),
                ranks=np.ones(1, np.int32),
            )
            reason = FinishReason.LENGTH if step == count - 1 else None
            outputs.append(
                EngineCoreOutput(request_id=str(i), new_token_ids=(step,), logprobs=columns, finish_reason=reason)
            )
        counts = StepCounts(*range(1, 9), accepted_at=(2, 1))
        outbox.put(outputs, step, stats(step, step_gaps=(float(step),), counts=counts))
    assert len(outbox._outputs) == sequences
    reader, found = BlockingStream(theirs), list[EngineOutputs]()
    while not found or found[-1].stats is None or found[-1].stats.step_id < count - 1:
        message = reader.receive()
        assert isinstance(message, EngineOutputs)
        found.append(message)
    assert len(found) < count / 10
    total = sum((message.stats.counts for message in found if message.stats), StepCounts())
    assert total == StepCounts(*(count * number for number in range(1, 9)), accepted_at=(2 * count, count))
    assert found[-1].stats is not None
    assert (found[-1].stats.num_waiting, found[-1].num_received) == (count - 1, count - 1)
    for i in range(sequences):
        own = [output for message in found for output in message.outputs if output.request_id == str(i)]
        assert [token for output in own for token in output.new_token_ids] == list(range(count))
        assert np.concatenate([o.logprobs.token_ids[:, 0] for o in own if o.logprobs]).tolist() == list(range(count))
        assert [output.finish_reason for output in own][-1] is FinishReason.LENGTH
    outbox.close(1.0)
    ours.close()
    reader.close()


def test_names_of_blocks_are_merged_and_given_up_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    outbox, reader = Outbox(BlockingStream(ours), "outbox"), BlockingStream(theirs)
    a, b, c = (bytes([i]) * 32 for i in range(3))
    with outbox._wakes:  # the thread does not run
        outbox.put_names({a: True, b: True}, (0, 1))
        outbox.put_names({b: False, c: True})
    assert reader.receive() == CachedBlocks(stored=b"", removed=b"", is_first=True, kinds=(0, 1))
    assert reader.receive() == CachedBlocks(stored=a + c, removed=b)
    monkeypatch.setattr(outbox_module, "MAX_NAMES", 2)
    monkeypatch.setattr(outbox_module, "NAMES_OF_MESSAGE", 1)
    with outbox._wakes:
        for names in ({a: True, b: True}, {c: True}, {a: False, b: True}):
            outbox.put_names(names)
    found = [reader.receive() for _ in range(3)]
    assert found == [
        CachedBlocks(stored=b"", removed=b"", is_first=True),
        CachedBlocks(stored=b"", removed=a),
        CachedBlocks(stored=b, removed=b""),
    ]
    outbox.close(1.0)
    ours.close()
    theirs.close()


def test_an_outbox_with_nothing_to_send_ends_as_soon_as_it_is_closed() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(BlockingStream(ours), "outbox")
    outbox.close(10.0)
    assert not outbox._thread.is_alive()  # it was woken
    ours.close()
    theirs.close()


def test_merged_reports_keep_the_newest_of_what_each_step_has_told() -> None:
    old, new = ((value,) * MAX_GAPS for value in (1.0, 2.0))
    merged = merge_stats(stats(1, step_gaps=old, step_time_ratios=old), stats(2, step_gaps=new, step_time_ratios=new))
    assert (merged.step_gaps, merged.step_time_ratios) == (new, new)


def test_merged_reports_have_all_that_was_transferred() -> None:
    def report(number: int) -> SchedulerStats:
        transfers = TransferCounts(load_bytes=number, tiers={"disk": {"reads": float(number)}})
        return stats(number, transfers=transfers)

    assert merge_stats(report(1), report(20)).transfers == TransferCounts(
        load_bytes=21, tiers={"disk": {"reads": 21.0}}
    )
    assert merge_stats(stats(1), stats(2)).transfers is None
