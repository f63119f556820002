"""What a row needs, as bits and as one record, and how wide a window of the most probable tokens a step examines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inflight.sample.rows import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MAX_WINDOW,
    MIN_TOKENS,
    OUTPUT_PENALTY,
    RANDOM,
    REPETITION,
    RESTRICTED,
    WINDOW,
    SamplingRows,
)
from inflight.sample.state import SamplingState, features_of, parameters_of
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import GREEDY, Row

VOCAB_SIZE = 50


def rows_of(params: Sequence[SamplingParams], vocab_size: int = VOCAB_SIZE) -> SamplingRows:
    state = SamplingState(len(params), vocab_size, "cpu")
    for slot, each in enumerate(params):
        state.add(slot, Row(each, stop_token_ids=[2]).resolved)
    return state.take(np.arange(len(params), dtype=np.int32))


def greedy(**fields: Any) -> SamplingParams:  # Any: the fields of SamplingParams
    return SamplingParams(temperature=0.0, **fields)


@pytest.mark.parametrize(
    ("params", "bits"),
    [
        (GREEDY, 0),
        (SamplingParams(), RANDOM),
        (SamplingParams(top_k=VOCAB_SIZE - 1), RESTRICTED),
        (SamplingParams(top_k=1), RESTRICTED),
        (SamplingParams(top_k=VOCAB_SIZE), RANDOM),
        (SamplingParams(top_p=0.99), RESTRICTED),
        (SamplingParams(min_p=0.01), RESTRICTED),
        (greedy(top_k=3, top_p=0.5, min_p=0.5), 0),
        (greedy(allowed_token_ids=[1]), ALLOWED),
        (greedy(logit_bias={1: 1.0}), BIAS),
        (greedy(logit_bias={}), 0),
        (greedy(min_tokens=1), MIN_TOKENS),
        (greedy(repetition_penalty=0.9), REPETITION),
        (greedy(frequency_penalty=0.1), OUTPUT_PENALTY),
        (greedy(presence_penalty=-0.1), OUTPUT_PENALTY),
        (greedy(logprobs=0), LOGPROBS),
        (SamplingParams(logprobs=1, repetition_penalty=2.0), RANDOM | LOGPROBS | REPETITION),
    ],
)
def test_which_bits_a_request_needs(params: SamplingParams, bits: int) -> None:
    assert features_of(Row(params, stop_token_ids=[2]).resolved, VOCAB_SIZE) == bits
    rows = rows_of([params, GREEDY])
    assert rows.is_plain == (bits in (0, RANDOM, RESTRICTED))
    assert rows.needs_history == (bits & (REPETITION | OUTPUT_PENALTY) != 0)
    assert rows.having(bits).tolist() == ([0] if bits else [])


def test_lists_set_their_bits() -> None:
    assert features_of(Row(greedy(min_tokens=3)).resolved, VOCAB_SIZE) == 0  # no token would end the text
    assert features_of(Row(GREEDY, bad_words=[[1]]).resolved, VOCAB_SIZE) == BAD_WORDS


def test_all_parameters_of_a_request_are_in_its_record() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        min_tokens=3,
        repetition_penalty=1.5,
        frequency_penalty=0.125,
        presence_penalty=-0.5,
        logprobs=4,
    )
    found = parameters_of(Row(params, seed=-1).resolved, VOCAB_SIZE)[0]
    assert {name: found[name].item() for name in found.dtype.names or ()} == {
        "seed": 2**64 - 1,
        "top_k": 7,
        "top_p": 0.75,
        "min_tokens": 3,
        "temperature": 0.5,
        "log_min_p": pytest.approx(np.log(0.25)),
        "repetition": 1.5,
        "frequency": 0.125,
        "presence": -0.5,
        "num_logprobs": 4,
    }
    found = parameters_of(Row(SamplingParams(top_k=99, logprobs=99)).resolved, VOCAB_SIZE)[0]
    assert (found["top_k"], found["top_p"], found["log_min_p"]) == (VOCAB_SIZE, 2.0, -np.inf)
    assert (found["num_logprobs"], found["min_tokens"]) == (VOCAB_SIZE, 0)
    assert parameters_of(Row(GREEDY).resolved, VOCAB_SIZE)[0]["top_k"] == VOCAB_SIZE


@pytest.mark.parametrize(
    ("params", "window"),
    [
        ([{"top_k": 3}], 4),  # one more shows whether another token has the same logit
        ([{"top_k": 3}, {"top_k": 9}], 10),
        ([{"top_k": 3}, {"top_p": 0.5}], WINDOW),
        ([{"min_p": 0.5}], WINDOW),
        ([{"top_k": WINDOW + 1}, {"top_p": 0.5}], WINDOW + 2),
        ([{"top_k": MAX_WINDOW - 1}], MAX_WINDOW),
        ([{"top_k": MAX_WINDOW}], MAX_WINDOW),
        ([{"top_k": 900}], MAX_WINDOW),
    ],
)
def test_the_window_of_a_step(params: list[dict[str, Any]], window: int) -> None:
    rows = rows_of([SamplingParams(**each) for each in params], vocab_size=1000)
    restricted = rows.metadata(np.ones(len(params), dtype=np.int32)).restricted
    assert restricted is not None and restricted.window == window


def test_a_window_has_no_more_tokens_than_the_vocabulary() -> None:
    for params, window in ((SamplingParams(top_p=0.5), VOCAB_SIZE), (SamplingParams(top_k=VOCAB_SIZE - 1), VOCAB_SIZE)):
        restricted = rows_of([params]).metadata(np.ones(1, dtype=np.int32)).restricted
        assert restricted is not None and restricted.window == window


def test_a_step_that_draws_is_not_greedy() -> None:
    positions = np.ones(2, dtype=np.int32)
    for params, is_greedy in ((GREEDY, True), (SamplingParams(), False), (SamplingParams(top_k=2), False)):
        assert rows_of([GREEDY, params]).metadata(positions).all_greedy == is_greedy


def test_columns_are_left_out_if_no_row_needs_them() -> None:
    rows = rows_of([greedy(logit_bias={1: 1.0}), SamplingParams(), GREEDY])
    sizes = [
        (len(taken.parameters), len(taken.lists))
        for taken in (rows.take(np.array(indices)) for indices in ([0, 1, 2], [1, 2], [2], [1, 1]))
    ]
    assert sizes == [(3, 3), (2, 0), (0, 0), (2, 0)]
