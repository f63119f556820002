"""`StepEntries`: what the parts of a `DeviceState` are after the entries of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.interface.step import BlockTableDelta, SchedulerOutput, TokenDelta
from inflight.sample.device_sampler import DeviceSampler
from inflight.worker.gpu.device_state import ALIGNMENT, DeviceState, StateSizes
from inflight.worker.gpu.step_entries import Column, StepEntries, StepShape
from inflight.worker.input_batch import StepInputs
from tests.support.plans import SAMPLING, ints, new_request, step_plan

VOCAB_SIZE = 16
PARAMETERS = DeviceSampler.parameters(SAMPLING, VOCAB_SIZE).tolist()
SIZES = StateSizes(
    max_num_tokens=12, max_num_seqs=3, max_model_len=10, max_blocks=4, num_groups=2, num_columns=len(PARAMETERS)
)
DUMMY = 3
OLD = -7  # what no entry has changed


class Bench:
    def __init__(self) -> None:
        self.state = DeviceState(SIZES, torch.device("cpu"))
        self.state.flat.fill_(OLD)

    def entries(self, *, draws: bool = True) -> StepEntries:
        return StepEntries(self.state, VOCAB_SIZE, draws=draws)

    def write(self, columns: list[Column]) -> None:
        for destinations, values in columns:
            self.state.flat[torch.from_numpy(np.asarray(destinations, dtype=np.int64))] = torch.from_numpy(values)

    def first(self, part: str, count: int) -> list[int]:
        """The first elements of a part; the next one, if there is one, is unchanged."""
        flat = self.state.part(part).flatten()
        assert (flat[count:] == OLD).all(), (part, flat)
        return flat[:count].tolist()


def make_plan(slots: Any, scheduled: Any, samples: list[bool], **fields: Any) -> SchedulerOutput:
    nothing = BlockTableDelta(slots=ints(), columns=ints(), block_ids=ints())
    given = {"block_table_deltas": (nothing, nothing), **fields}
    return step_plan(slots, [4] * len(slots), scheduled, samples, step_id=1, **given)


def inputs_of(plan: SchedulerOutput, ids: Any, *, drawn: Any, drawn_slots: Any) -> StepInputs:
    lengths, starts = plan.num_scheduled_tokens, np.concatenate([ints(0), np.cumsum(plan.num_scheduled_tokens)])
    sampling = np.flatnonzero(plan.samples).astype(np.int32)
    return StepInputs(
        input_ids=ids,
        positions=np.concatenate([4 + np.arange(length) for length in lengths]).astype(np.int32),
        query_start_loc=starts.astype(np.int32),
        num_computed_tokens=plan.num_computed_tokens,
        seq_lens=plan.num_computed_tokens + lengths,
        sampling_rows=sampling,
        draw_start_loc=np.arange(len(sampling) + 1, dtype=np.int32),
        drawn_tokens=drawn,
        drawn_slots=drawn_slots,
        drawn_in_step=0,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "positions", "starts", "length"),
    [
        (3, 3, [0, 0, 0], [0, 1, 2, 3, 3], 1),
        (2, 2, [0, 0], [0, 1, 2, 2, 2], 1),
        (5, 1, [0, 1, 2, 3, 4], [0, 5, 5, 5, 5], 5),
    ],
)
def test_a_dummy_step_is_all_in_the_dummy_slot(
    num_tokens: int, num_rows: int, positions: list[int], starts: list[int], length: int
) -> None:
    bench = Bench()
    bench.write(bench.entries().dummies(num_tokens, num_rows))
    assert bench.first("input_ids", num_tokens) == [0] * num_tokens
    assert bench.first("positions", num_tokens) == positions
    assert bench.first("token_slots", num_tokens) == [DUMMY] * num_tokens
    assert bench.first("query_start_loc", 5) == starts
    assert bench.first("seq_lens", num_rows) == [length] * num_rows
    for part in ("slots", "draw_slots"):
        assert bench.first(part, num_rows) == [DUMMY] * num_rows
    assert bench.first("logits_indices", num_rows) == [0] * num_rows
    assert bench.first("draw_positions", num_rows) == [1] * num_rows


def test_tokens_that_another_rank_has_drawn_are_the_last_tokens_of_their_slots() -> None:
    bench = Bench()
    bench.write(bench.entries().drawn(ints(2, 0), ints(11, 12)))
    assert bench.state.part("last_tokens").tolist() == [12, OLD, 11, OLD]


def test_block_tables() -> None:
    """A new request has its whole tables; what the plan adds to the request before it in the same slot does not count."""
    bench = Bench()
    deltas = (
        BlockTableDelta(slots=ints(0, 1, 2), columns=ints(3, 2, 1), block_ids=ints(30, 31, 32)),
        BlockTableDelta(slots=ints(0), columns=ints(1), block_ids=ints(40)),
    )
    new = new_request(1, (1, 2), (20, 21), (22,))
    bench.write(
        bench.entries().tables(make_plan(ints(0), ints(1), [True], new_requests=(new,), block_table_deltas=deltas))
    )
    nothing = [OLD] * 4
    assert bench.state.part("block_tables").tolist() == [
        [[OLD, OLD, OLD, 30], [20, 21, OLD, OLD], [OLD, 32, OLD, OLD], nothing],
        [[OLD, 40, OLD, OLD], [22, OLD, OLD, OLD], nothing, nothing],
    ]
    bench.write(bench.entries().tables(make_plan(ints(0), ints(1), [True], block_table_deltas=deltas)))
    assert bench.state.part("block_tables")[0, 1].tolist() == [20, 21, 31, OLD]


def test_a_padded_decode() -> None:
    bench, plan = Bench(), make_plan(ints(2, 0), ints(1, 1), [True, True])
    inputs = inputs_of(plan, ints(0, 13), drawn=ints(0), drawn_slots=ints(2))
    columns, counts = bench.entries().of(plan, inputs, StepShape("decode", 3, 3, 3), ())
    bench.write(columns)
    assert bench.state.part("input_ids")[1:4].tolist() == [13, 0, OLD], "and the first is the source of a copy"
    assert bench.first("positions", 3) == [4, 4, 0]
    assert bench.first("seq_lens", 3) == [5, 5, 1]
    for part in ("slots", "token_slots", "draw_slots"):
        assert bench.first(part, 3) == [2, 0, DUMMY], part
    assert bench.first("draw_positions", 3) == [5, 5, 1]
    assert bench.first("query_start_loc", 0) == bench.first("logits_indices", 0) == []
    # two tokens, and three for each of positions, lengths and slots, with those of the tokens
    assert (counts.tables, counts.rows, counts.drawn, counts.requests) == (0, 14, 15, 21)
    ends = np.cumsum([len(destinations) for destinations, _ in columns]).tolist()
    destinations, sources = columns[ends.index(counts.drawn)]
    assert destinations.tolist() == [bench.state.start["input_ids"]]
    assert sources.tolist() == [bench.state.start["last_tokens"] + 2]


@pytest.mark.parametrize(("num_draws", "samples"), [(2, [False, True]), (0, [False, False])])
def test_a_padded_mixed_step(num_draws: int, samples: list[bool]) -> None:
    """All padding tokens are in one more row, and rows beyond are empty."""
    bench, plan = Bench(), make_plan(ints(1, 0), ints(3, 2), samples)
    inputs = inputs_of(plan, ints(1, 2, 3, 4, 5), drawn=ints(), drawn_slots=ints())
    bench.write(bench.entries().of(plan, inputs, StepShape("mixed", 8, 4, num_draws), ())[0])
    assert bench.first("input_ids", 8) == [1, 2, 3, 4, 5, 0, 0, 0]
    assert bench.first("positions", 8) == [4, 5, 6, 4, 5, 0, 1, 2]
    assert bench.first("token_slots", 8) == [1, 1, 1, 0, 0, DUMMY, DUMMY, DUMMY]
    assert bench.first("query_start_loc", 5) == [0, 3, 5, 8, 8]
    assert bench.first("seq_lens", 4) == [7, 6, 3, 0]
    assert bench.first("slots", 4) == [1, 0, DUMMY, DUMMY]
    assert bench.first("logits_indices", max(num_draws, 1)) == ([4, 0] if num_draws else [0])
    assert bench.first("draw_slots", num_draws) == [0, DUMMY][:num_draws]
    assert bench.first("draw_positions", num_draws) == [6, 1][:num_draws]


def test_a_step_without_padding_has_no_row_of_padding() -> None:
    bench, plan = Bench(), make_plan(ints(1, 0), ints(3, 2), [True, True])
    inputs = inputs_of(plan, ints(1, 2, 3, 4, 5), drawn=ints(), drawn_slots=ints())
    bench.write(bench.entries().of(plan, inputs, StepShape("eager", 5, 2, 2), ())[0])
    assert bench.first("query_start_loc", 3) == [0, 3, 5]
    assert bench.first("seq_lens", 2) == [7, 6]
    assert bench.first("slots", 2) == [1, 0]
    assert bench.first("logits_indices", 2) == [2, 4]


@pytest.mark.parametrize("draws", [True, False])
def test_parameters_and_history_are_of_stages_that_draw(draws: bool) -> None:
    """Forced tokens join the history, except of a new request, which has them already."""
    forced = TokenDelta(slots=ints(0, 1, 2), positions=ints(5, 1, 3), token_ids=ints(14, 15, 13))
    new = new_request(1, (7, 8, 9), (20,), (22,)), new_request(2, (3,), (21,), (23,))
    plan = make_plan(ints(1, 2), ints(1, 1), [True, True], new_requests=new, forced_tokens=forced)
    inputs = inputs_of(plan, ints(1, 2), drawn=ints(), drawn_slots=ints())
    bench = Bench()
    columns, counts = bench.entries(draws=draws).of(plan, inputs, StepShape("decode", 2, 2, 2), new[:1])
    bench.write(columns)
    history = torch.full((4, 10), OLD)
    parameters = torch.full((len(PARAMETERS), 4), OLD)
    if draws:
        history[1, :3] = torch.tensor([7, 8, 9])
        history[0, 5], history[2, 3] = 14, 13
        parameters[:, 1] = parameters[:, 2] = torch.tensor(PARAMETERS)
    assert bench.state.part("history").tolist() == history.tolist()
    assert bench.state.part("columns").tolist() == parameters.tolist()
    assert bench.first("draw_slots", 2 if draws else 0) == [1, 2][: 2 if draws else 0]
    assert (counts.requests > counts.drawn) == draws


def test_the_parts_of_a_state_are_apart_and_aligned() -> None:
    state = DeviceState(SIZES, torch.device("cpu"))
    assert not state.flat.any()
    for number, name in enumerate(state.start, 1):
        assert state.start[name] % ALIGNMENT == 0
        assert not state.part(name).any(), name
        state.part(name).fill_(number)
    assert state.part("query_start_loc").shape == (5,)
    assert state.part("last_tokens").shape == (4,)
    assert state.part("block_tables").shape == (2, 4, 4)
    assert state.part("history").shape == (4, 10)
    for name, shape in SIZES.parts().items():
        assert state.part(name).shape == shape
    assert len(state.flat) == state.start["history"] + ALIGNMENT
