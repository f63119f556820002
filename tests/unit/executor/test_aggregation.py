"""Any order and any duplication of replies gives the same outputs."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.aggregation import KVConnectorAggregator, merge_outputs
from inflight.executor.pending import PendingStep
from inflight.executor.reply_table import ReplyTable
from inflight.interface.messages import StepReply
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput
from tests.conformance.configs import plan

REQUEST_IDS = st.frozensets(st.sampled_from("abcd"))
KV_OUTPUTS = st.builds(
    KVConnectorOutput,
    finished_sending=REQUEST_IDS,
    finished_receiving=REQUEST_IDS,
    failed_block_ids=st.frozensets(st.integers(1, 4)),
)


def output(step_id: int, rank: int, kv_connector_output: KVConnectorOutput) -> ModelRunnerOutput:
    tokens = np.array([1000 * step_id + rank], dtype=np.int32)
    return ModelRunnerOutput(step_id=step_id, kv_connector_output=kv_connector_output, sampled_token_ids=tokens)


def expected(reports: list[list[KVConnectorOutput]]) -> list[KVConnectorOutput]:
    """What the steps report, from the definition: `reports[step][rank]`."""
    merged = []
    sent: list[set[str]] = [set() for _ in reports[0]]
    received: list[set[str]] = [set() for _ in reports[0]]
    for of_rank in reports:
        for rank, report in enumerate(of_rank):
            sent[rank] |= report.finished_sending
            received[rank] |= report.finished_receiving
        all_sent, all_received = set.intersection(*sent), set.intersection(*received)
        merged.append(
            KVConnectorOutput(
                finished_sending=frozenset(all_sent),
                finished_receiving=frozenset(all_received),
                failed_block_ids=frozenset().union(*(report.failed_block_ids for report in of_rank)),
            )
        )
        for rank in range(len(of_rank)):
            sent[rank] -= all_sent
            received[rank] -= all_received
    return merged


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[KVConnectorOutput]], int]:
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row = st.lists(KV_OUTPUTS, min_size=num_ranks, max_size=num_ranks)
    return draw(st.lists(row, min_size=num_steps, max_size=num_steps)), draw(st.integers(0, 2**32))


@given(runs())
def test_replies_in_any_order_and_number_give_the_same_outputs(run: tuple[list[list[KVConnectorOutput]], int]) -> None:
    """Each rank answers its steps in order; how the ranks interleave, and what comes twice, is up to chance."""
    reports, seed = run
    chance = random.Random(seed)
    num_ranks, output_rank = len(reports[0]), chance.randrange(len(reports[0]))
    table = ReplyTable(
        num_ranks=num_ranks, output_rank=output_rank, step_budget=60, ask=lambda rank: None, state=lambda rank: ""
    )
    steps = [PendingStep(plan(step_id), num_ranks) for step_id in range(len(reports))]
    for step in steps:
        assert table.add_step(step)
    to_come = [rank for rank in range(num_ranks) for _ in reports]
    chance.shuffle(to_come)
    next_step = [0] * num_ranks
    delivered: list[StepReply] = []
    for rank in to_come:
        step_id = next_step[rank]
        next_step[rank] += 1
        result = output(step_id, rank, reports[step_id][rank])
        delivered.append(StepReply(epoch=0, step_id=step_id, rank=rank, result=result))
        table.deliver(delivered[-1])
        for _ in range(chance.randrange(3)):
            table.deliver(chance.choice(delivered))
    table.close()
    outputs = [step.future.result(timeout=0) for step in steps]
    assert [o.kv_connector_output for o in outputs] == expected(reports)
    assert [int(o.sampled_token_ids[0]) for o in outputs] == [1000 * i + output_rank for i in range(len(steps))]


@given(st.lists(st.tuples(st.integers(0, 2), KV_OUTPUTS), max_size=8), st.randoms(use_true_random=False))
def test_add_is_commutative_and_idempotent(adds: list[tuple[int, KVConnectorOutput]], chance: random.Random) -> None:
    once, shuffled = KVConnectorAggregator(3), KVConnectorAggregator(3)
    for rank, report in adds:
        once.add(rank, report)
    again = adds + [chance.choice(adds) for _ in range(len(adds))]
    chance.shuffle(again)
    for rank, report in again:
        shuffled.add(rank, report)
    assert once.take() == shuffled.take()
    assert once.take() == shuffled.take() == KVConnectorOutput()  # each report comes out once


def test_a_report_of_a_later_life_of_the_request_starts_anew() -> None:
    aggregator = KVConnectorAggregator(2)
    done = KVConnectorOutput(finished_sending=frozenset("a"))
    aggregator.add(0, done)
    aggregator.add(1, done)
    assert aggregator.take() == done
    aggregator.add(0, done)
    assert aggregator.take() == KVConnectorOutput()
    aggregator.add(1, done)
    assert aggregator.take() == done


def test_an_output_without_reports_is_passed_on_as_it_is() -> None:
    outputs = {rank: output(0, rank, KVConnectorOutput()) for rank in range(3)}
    assert merge_outputs(outputs, 2, KVConnectorAggregator(3)) is outputs[2]
