"""`SamplingState`: columns per slot, and the metadata made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from inflight.interface.request import ResolvedSampling
from inflight.sample.processors import LogitsProcessors
from inflight.sample.rows import SamplingMetadata, SamplingRows
from inflight.sample.sampler import Sampler
from inflight.sample.seeds import draw_keys
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import GREEDY, Row, step_of

VOCAB_SIZE = 50


def resolved(seed: int = 0, **fields: Any) -> ResolvedSampling:  # Any: the fields of SamplingParams
    return Row(SamplingParams(**fields), seed=seed, stop_token_ids=[2]).resolved


def metadata(state: SamplingState, slots: list[int], positions: list[int]) -> SamplingMetadata:
    return state.take(np.array(slots, dtype=np.int32)).metadata(np.array(positions, dtype=np.int32))


def processors(state: SamplingState, slots: list[int], positions: list[int]) -> LogitsProcessors | None:
    """Of prompts of one token."""
    rows, ends = state.take(np.array(slots, dtype=np.int32)), np.array(positions, dtype=np.int32)
    return LogitsProcessors.of(rows, ends, np.ones_like(ends), None, torch.from_numpy)


def test_a_plain_greedy_batch_needs_nothing() -> None:
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    for slot in range(8):
        state.add(slot, Row(GREEDY, seed=slot, stop_token_ids=[2]).resolved)
    built = metadata(state, [3, 1, 2], [5, 6, 7])
    assert built == SamplingMetadata(num_rows=3)
    assert built.all_greedy


def test_no_rows() -> None:
    assert metadata(SamplingState(8, VOCAB_SIZE, "cpu"), [], []) == SamplingMetadata(num_rows=0)


def test_rows_are_divided_by_the_way_they_are_drawn() -> None:
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    state.add(0, resolved(temperature=0))
    state.add(1, resolved(seed=11, temperature=0.5))
    state.add(2, resolved(seed=12, top_k=7, top_p=0.5, min_p=0.25))
    state.add(3, resolved(seed=13, top_p=0.75, temperature=2.0))
    built = metadata(state, [3, 0, 1, 2, 0], [10, 20, 30, 40, 50])
    assert not built.all_greedy
    assert built.greedy_rows is not None
    assert built.greedy_rows.tolist() == [1, 4]
    assert built.random is not None
    assert built.random.rows is not None
    assert built.random.rows.tolist() == [2]
    assert built.random.temperature is not None
    assert built.random.temperature.tolist() == [[0.5]]
    restricted = built.restricted
    assert restricted is not None
    assert restricted.rows is not None
    assert restricted.rows.tolist() == [0, 3]
    assert restricted.temperature is not None
    assert restricted.temperature.tolist() == [[2.0], [1.0]]
    assert restricted.top_k.tolist() == [[VOCAB_SIZE], [7]]
    assert restricted.top_p.tolist() == [[0.75], [0.5]]
    assert restricted.log_min_p.exp().tolist() == [[0.0], [0.25]]
    keys = draw_keys(np.array([13, 11, 12], dtype=np.uint64), np.array([10, 30, 40]))
    assert restricted.keys.tolist() == keys[[0, 2]].tolist()
    assert built.random.keys.tolist() == keys[[1]].tolist()


def test_all_rows_alike_are_not_gathered() -> None:
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    for slot in range(4):
        state.add(slot, resolved(seed=slot))
    built = metadata(state, [0, 1, 2, 3], [1, 2, 3, 4])
    assert built.random is not None
    assert built.random.rows is None
    assert built.random.temperature is None
    assert built.greedy_rows is None
    assert built.restricted is None


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": -1}, {"top_k": VOCAB_SIZE}, {"top_k": 2**31 - 1}, {"top_p": 1.0, "min_p": 0.0}]
)
def test_limits_that_limit_nothing(fields: dict[str, Any]) -> None:
    state = SamplingState(1, VOCAB_SIZE, "cpu")
    state.add(0, resolved(**fields))
    assert metadata(state, [0], [3]).restricted is None


def test_a_slot_forgets_its_last_request() -> None:
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    everything = resolved(
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=1.0,
        logit_bias={1: 1.0},
        allowed_token_ids=[1, 3],
        min_tokens=16,
        logprobs=3,
    )
    state.add(0, dataclasses.replace(everything, bad_words_token_ids=((4,), (5, 6))))
    full = processors(state, [0], [3])
    assert full is not None and metadata(state, [0], [3]).restricted is not None
    names = {
        "bias_entries",
        "word_entries",
        "stop_entries",
        "repetition",
        "frequency",
        "presence",
        "logprobs_rows",
        "masks",
    }
    assert names <= full.tensors.keys()
    assert full.num_logprobs == 3
    state.add(0, Row(GREEDY).resolved)
    assert metadata(state, [0], [3]) == SamplingMetadata(num_rows=1)
    assert processors(state, [0], [3]) is None


def test_rows_are_a_snapshot() -> None:
    """The next step is prepared while this one runs."""
    state = SamplingState(2, VOCAB_SIZE, "cpu")
    fields: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 9, "top_k": 3}
    state.add(0, resolved(seed=1, **fields))
    state.add(1, resolved(seed=2, temperature=0.5))
    slots, history = np.array([1, 0], dtype=np.int32), torch.arange(20, dtype=torch.int32).reshape(2, 10)
    positions, num_prompt = np.array([5, 6], dtype=np.int32), np.array([2, 2], dtype=np.int32)
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def drawn(rows: SamplingRows) -> list[int]:
        found = LogitsProcessors.of(rows, positions, num_prompt, None, torch.from_numpy)
        return Sampler(VOCAB_SIZE, "cpu")(logits.clone(), rows.metadata(positions), found, history).token_ids.tolist()

    expected, rows = drawn(state.take(slots)), state.take(slots)
    state.add(0, resolved(temperature=0, logit_bias={7: 100.0}))
    state.add(1, resolved(seed=3, temperature=5.0))
    slots[:] = 1
    assert rows.slots.tolist() == [1, 0]
    assert drawn(rows) == expected


def test_processors_are_a_snapshot() -> None:
    state = SamplingState(2, VOCAB_SIZE, "cpu")
    state.add(0, resolved(seed=1, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=9))
    positions, num_prompt = np.array([6], dtype=np.int32), np.array([2], dtype=np.int32)
    history, logits = torch.arange(10, dtype=torch.int32)[None], torch.ones(2, 1, VOCAB_SIZE)
    for changed, result in zip((False, True), logits, strict=True):
        found = LogitsProcessors.of(
            state.take(np.zeros(1, dtype=np.int32)), positions, num_prompt, None, torch.from_numpy
        )
        if changed:
            positions[:], num_prompt[:] = 1, 1
        assert found is not None
        found.apply(result, history)
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], torch.ones(1, VOCAB_SIZE))


def test_which_slots_need_history() -> None:
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0, "min_tokens": 3, "logprobs": 2},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
    ]
    for slot, fields in enumerate(kinds):
        state.add(slot, resolved(**fields))
    state.add(4, Row(GREEDY, bad_words=[[1, 2]]).resolved)
    needs = [state.take(np.array([slot], dtype=np.int32)).needs_history for slot in range(5)]
    assert needs == [False, False, True, True, True]
    assert state.take(np.array([0, 1, 2], dtype=np.int32)).needs_history
    assert not state.take(np.array([1, 0], dtype=np.int32)).needs_history
    assert not state.take(np.empty(0, dtype=np.int32)).needs_history


def test_rows_are_taken_from_rows() -> None:
    """A step's rows are known late: some of those that were copied when it was planned, several times, in another order."""
    state = SamplingState(8, VOCAB_SIZE, "cpu")
    state.add(1, resolved(seed=5, frequency_penalty=2.0, top_k=4))
    state.add(2, resolved(seed=6, temperature=0.5, logprobs=2, logit_bias={3: 1.0}, min_tokens=9))
    state.add(3, Row(GREEDY).resolved)
    at_once = state.take(np.array([2, 2, 1, 3], dtype=np.int32))
    later = state.take(np.array([1, 3, 2], dtype=np.int32)).take(np.array([2, 2, 0, 1]))
    positions, num_prompt = np.array([4, 5, 6, 7]), np.array([2, 2, 2, 2])
    for slot in range(8):
        state.add(slot, resolved(repetition_penalty=3.0))
    assert (later.num_rows, later.slots.tolist()) == (4, [2, 2, 1, 3])
    assert later.needs_history
    assert not later.take(np.array([0, 3])).needs_history
    assert repr(later.metadata(positions)) == repr(at_once.metadata(positions))
    of_later, of_at_once = (
        LogitsProcessors.of(rows, positions, num_prompt, None, torch.from_numpy) for rows in (later, at_once)
    )
    assert of_later is not None and repr(of_later) == repr(of_at_once)
    greedy = later.take(np.array([3, 3]))
    assert greedy.metadata(positions[:2]) == SamplingMetadata(num_rows=2)
    assert LogitsProcessors.of(greedy, positions[:2], num_prompt[:2], None, torch.from_numpy) is None


def test_a_slot_may_come_twice() -> None:
    """Drafts being verified: each position with its own draw, and its own history."""
    state = SamplingState(2, VOCAB_SIZE, "cpu")
    state.add(1, resolved(seed=5, frequency_penalty=2.0))
    history = torch.tensor([[0] * 6, [1, 2, 3, 4, 4, 4]], dtype=torch.int32)
    positions, num_prompt = np.array([2, 4, 6], dtype=np.int32), np.array([2, 2, 2])
    rows = state.take(np.array([1, 1, 1], dtype=np.int32))
    random = rows.metadata(positions).random
    assert random is not None
    assert random.keys.tolist() == draw_keys(np.full(3, 5, dtype=np.uint64), positions).tolist()
    found, logits = LogitsProcessors.of(rows, positions, num_prompt, None, torch.from_numpy), torch.zeros(3, VOCAB_SIZE)
    assert found is not None
    found.apply(logits, history)
    assert logits.nonzero().tolist() == [[1, 3], [1, 4], [2, 3], [2, 4]]
    assert logits[logits != 0].tolist() == [-2.0, -2.0, -2.0, -6.0]


def test_extreme_values_stay_finite() -> None:
    rows = [Row(SamplingParams(temperature=1e-300, top_p=5e-324, repetition_penalty=1e-300), prompt=[1])]
    built, found, _ = step_of(rows, VOCAB_SIZE)
    assert built.restricted is not None
    assert built.restricted.temperature is not None
    assert found is not None
    assert float(built.restricted.temperature) > 0
    assert float(built.restricted.top_p) > 0
    assert float(found.tensors["repetition"]) > 0
