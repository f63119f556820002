"""`StepEntries`: turns a plan (the scheduler's output) into entries (destination, value), which update the `DeviceState`.

    tables    block tables, and rope_deltas of new requests
    rows      tokens, positions, slots, lengths, padding
    drawn     inputs that were drawn on the device: (destination, source)
    draws     slots and positions of the draws
    requests  sampling parameters of new requests, and their tokens if penalties or bad words read them

Tables, rows and drawn are applied before the forward. Draws and requests are applied before the draws. If a step computes
exactly the tokens that the previous step drew, the draw kernels have already updated the state, and only tables are needed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.sample.device_sampler import DeviceSampler
from inflight.worker.gpu.device_state import DeviceState
from inflight.worker.input_batch import StepInputs

IndexArray = npt.NDArray[np.int64]
Column = tuple[IndexArray, Int32Array]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The padded sizes of a step. If `kind` is "decode", every row computes one token and draws one. Any other step is "mixed"
    if there is a CUDA graph for its size, and "eager" otherwise. The tokens of eager steps are not padded."""

    kind: str
    num_tokens: int
    num_rows: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class EntryCounts:
    """Where each part of the entries ends: the index after its last entry. `requests` includes the entries of draws."""

    tables: int
    rows: int
    drawn: int
    requests: int


class StepEntries:
    """Only the thread that prepares uses it. It keeps no data of a step. `draws`: whether this pipeline stage draws tokens."""

    def __init__(self, state: DeviceState, vocab_size: int, *, draws: bool) -> None:
        self._start = state.start
        self._sizes = state.sizes
        self._vocab_size = vocab_size
        self._has_draws = draws

    def of(
        self, plan: SchedulerOutput, inputs: StepInputs, shape: StepShape, with_history: tuple[NewRequestData, ...]
    ) -> tuple[list[Column], EntryCounts]:
        """All entries of a step. `with_history`: the new requests whose draws depend on older tokens."""
        parts = [
            self.tables(plan),
            self._rows(plan, inputs, shape),
            [self._drawn(inputs)],
            [*self._draws(plan, inputs, shape), *self._requests(plan, with_history)] if self._has_draws else [],
        ]
        ends = np.cumsum([sum(len(destinations) for destinations, _ in part) for part in parts]).tolist()
        return [column for part in parts for column in part], EntryCounts(*ends)

    def dummies(self, num_tokens: int, num_rows: int) -> list[Column]:
        """The entries of a step in the dummy slot, which no request has: `num_rows` rows of one token, or one row of
        `num_tokens` tokens. Each row draws."""
        dummy = self._sizes.dummy_slot
        length = num_tokens // num_rows
        starts = np.full(self._sizes.max_num_rows + 1, num_tokens)
        starts[: num_rows + 1] = np.arange(num_rows + 1) * length
        return [
            self._run("input_ids", np.zeros(num_tokens)),
            self._run("positions", np.arange(num_tokens) % length),
            self._run("token_slots", np.full(num_tokens, dummy)),
            self._run("query_start_loc", starts),
            self._run("seq_lens", np.full(num_rows, length)),
            self._run("slots", np.full(num_rows, dummy)),
            self._run("logits_indices", np.zeros(num_rows)),
            self._run("draw_slots", np.full(num_rows, dummy)),
            self._run("draw_positions", np.ones(num_rows)),
        ]

    def drawn(self, slots: Int32Array, token_ids: Int32Array) -> list[Column]:
        """Entries for tokens that another rank has drawn."""
        return [(self._start["last_tokens"] + slots.astype(np.int64), token_ids)]

    def _run(self, part: str, values: npt.NDArray[Any]) -> Column:
        """Entries that set the first elements of a part to `values`."""
        return self._start[part] + np.arange(len(values)), values.astype(np.int32, copy=False)

    def tables(self, plan: SchedulerOutput) -> list[Column]:
        """The entries of the block tables, and what the positions of new requests are moved by."""
        found: list[Column] = []
        num_slots = self._sizes.max_num_seqs + 1
        width = self._sizes.max_blocks
        new = {data.slot for data in plan.new_requests}
        for group, delta in enumerate(plan.block_table_deltas):
            start = self._start["block_tables"] + group * num_slots * width
            kept = ~np.isin(delta.slots, list(new)) if new else slice(None)
            slots = delta.slots[kept].astype(np.int64)
            columns = delta.columns[kept]
            found.append((start + slots * width + columns, delta.block_ids[kept]))
            for data in plan.new_requests:
                block_ids = data.block_ids[group]
                found.append((start + data.slot * width + np.arange(len(block_ids)), block_ids))
        if plan.new_requests:
            slots = np.array([data.slot for data in plan.new_requests], dtype=np.int64)
            deltas = [sum(part.rope_delta for part in data.parts) for data in plan.new_requests]
            found.append((self._start["rope_deltas"] + slots, np.array(deltas, dtype=np.int32)))
        return found

    def _rows(self, plan: SchedulerOutput, inputs: StepInputs, shape: StepShape) -> list[Column]:
        num_tokens = len(inputs.input_ids)
        num_rows = len(plan.slots)
        dummy = self._sizes.dummy_slot
        padding = shape.num_tokens - num_tokens
        known = np.ones(shape.num_tokens, dtype=np.bool_)
        known[inputs.drawn_tokens] = False
        ids = np.flatnonzero(known)
        lengths = plan.num_scheduled_tokens
        token_slots = np.repeat(plan.slots, lengths)
        columns: list[Column] = [(self._start["input_ids"] + ids, _padded(inputs.input_ids, padding, 0)[ids])]
        if shape.kind == "decode":
            columns += [
                self._run("positions", _padded(inputs.positions, padding, 0)),
                self._run("seq_lens", _padded(inputs.seq_lens, padding, 1)),
                self._run("slots", _padded(plan.slots, padding, dummy)),
            ]
        else:  # all padding tokens are in one more row, which belongs to the dummy slot
            rows_of_padding = 1 if padding else 0
            beyond = shape.num_rows - num_rows - rows_of_padding
            num_indices = max(shape.num_draws, 1)  # if nothing is drawn, the model still returns one row
            columns += [
                self._run("positions", np.concatenate([inputs.positions, np.arange(padding)])),
                self._run(
                    "query_start_loc", _padded(inputs.query_start_loc, rows_of_padding + beyond, shape.num_tokens)
                ),
                self._run("seq_lens", _padded(_padded(inputs.seq_lens, rows_of_padding, padding), beyond, 0)),
                self._run("slots", _padded(plan.slots, rows_of_padding + beyond, dummy)),
                self._run("logits_indices", _padded(inputs.draw_tokens, num_indices - len(inputs.sampling_rows), 0)),
            ]
        return [*columns, self._run("token_slots", _padded(token_slots, padding, dummy))]

    def _drawn(self, inputs: StepInputs) -> Column:
        sources = self._start["last_tokens"] + inputs.drawn_slots
        return self._start["input_ids"] + inputs.drawn_tokens.astype(np.int64), sources.astype(np.int32)

    def _draws(self, plan: SchedulerOutput, inputs: StepInputs, shape: StepShape) -> list[Column]:
        slots = plan.slots[inputs.sampling_rows]
        padding = shape.num_draws - len(slots)
        return [
            self._run("draw_slots", _padded(slots, padding, self._sizes.dummy_slot)),
            self._run("draw_positions", _padded(inputs.first_positions, padding, 1)),
        ]

    def _requests(self, plan: SchedulerOutput, with_history: tuple[NewRequestData, ...]) -> list[Column]:
        found = [self._parameters(data.slot, data.sampling) for data in plan.new_requests]
        history = self._start["history"]
        max_model_len = self._sizes.max_model_len
        for data in with_history:
            found.append((history + data.slot * max_model_len + np.arange(len(data.token_ids)), data.token_ids))
        if (forced := plan.forced_tokens) is not None:
            new = {data.slot for data in with_history}
            kept = ~np.isin(forced.slots, list(new)) if new else slice(None)
            places = forced.slots[kept].astype(np.int64) * max_model_len + forced.positions[kept]
            found.append((history + places, forced.token_ids[kept]))
        return found

    def _parameters(self, slot: int, sampling: ResolvedSampling) -> Column:
        values = DeviceSampler.parameters(sampling, self._vocab_size)
        columns = np.arange(len(values)) * (self._sizes.max_num_seqs + 1)
        return self._start["columns"] + columns + slot, values


# Any: all integer types
def _padded(values: npt.NDArray[Any], count: int, value: int) -> npt.NDArray[Any]:
    if count > 0:
        return np.concatenate([values, np.full(count, value, dtype=values.dtype)])
    return values
