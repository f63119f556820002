"""min_p, top_k and top_p against transformers' warpers, and the window against a full sort."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.sample.candidates import Limits, Prefix, draw_restricted, race_all, survivors
from inflight.sample.noise import token_hashes
from inflight.sample.reductions import sort_keys, top_window
from inflight.sample.rows import MAX_WINDOW, WINDOW, RestrictedRows
from inflight.sample.sampler import IMPOSSIBLE_TOKEN
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import Row, step_of, tokens_of

CPU = torch.device("cpu")


def logits_of(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def restricted_of(params: SamplingParams, num_rows: int, vocab_size: int) -> RestrictedRows:
    restricted = step_of([Row(params, seed=i) for i in range(num_rows)], vocab_size)[0].restricted
    assert restricted is not None
    return restricted


def kept_by(params: SamplingParams, logits: Tensor, window: int | None = None) -> list[set[int]]:
    """The survivors of each row: by the window where it decides, by testing each token where not."""
    logits = logits / params.temperature
    num_rows, vocab_size = logits.shape
    if params.top_k >= vocab_size and params.top_p == 1.0 and params.min_p == 0.0:
        return [set(range(vocab_size))] * num_rows  # not a restricted row at all
    restricted = restricted_of(params, num_rows, vocab_size)
    limits = Limits.of(logits, restricted)
    values, ids = top_window(logits, min(window or restricted.window, vocab_size))
    kept, decided = survivors(values, limits)
    return [
        set(ids[i][kept[i]].tolist()) if decided[i] else kept_of_all(logits[i : i + 1], limits.rows(slice(i, i + 1)))
        for i in range(num_rows)
    ]


def kept_of_all(logits: Tensor, limits: Limits) -> set[int]:
    """A prefix, so its end is found by bisection."""
    prefix = Prefix.of(logits.clone(), limits)
    order = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    order = [token for token in order if prefix.weights[0, token] > 0]

    def out(index: int) -> bool:
        return not bool(prefix.holds(torch.tensor([[order[index]]])))

    return set(order[: bisect.bisect_left(range(len(order)), True, key=out)])


def kept_by_transformers(params: SamplingParams, logits: Tensor) -> list[set[int]]:
    """Its warpers, in our order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.double())
    return [set((row > -torch.inf).nonzero()[:, 0].tolist()) for row in scores]


@pytest.mark.parametrize("vocab_size", [7, 100, WINDOW, WINDOW + 1, 3001, 20_011])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=2, temperature=0.3),
        SamplingParams(top_k=WINDOW - 1),
        SamplingParams(top_k=WINDOW),
        SamplingParams(top_k=WINDOW + 1),
        SamplingParams(top_k=MAX_WINDOW),
        SamplingParams(top_k=5000),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=0.1),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.99, temperature=4.0),
        SamplingParams(min_p=1.0),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1e-4, temperature=2.0),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(top_k=1000, top_p=0.95, temperature=3.0),
        SamplingParams(top_k=20, min_p=0.05),
        SamplingParams(top_p=0.8, min_p=0.01, temperature=2.0),
        SamplingParams(top_k=300, top_p=0.97, min_p=1e-3, temperature=2.0),
    ],
    ids=lambda value: f"k{value.top_k}-p{value.top_p}-min{value.min_p}" if isinstance(value, SamplingParams) else None,
)
def test_survivors_are_those_of_transformers(params: SamplingParams, vocab_size: int) -> None:
    logits = logits_of(4 if vocab_size < 10_000 else 2, vocab_size)
    expected = kept_by_transformers(params, logits)
    assert kept_by(params, logits) == expected
    assert kept_by(params, logits, window=1) == expected  # by testing each token, mostly


def test_top_k_keeps_what_ties_with_the_kth() -> None:
    """As transformers and vLLM do."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    params = SamplingParams(top_k=2)
    assert kept_by(params, logits) == kept_by_transformers(params, logits) == [{1, 2, 3, 4}]


def test_top_k_keeps_ties_beyond_the_window() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, 10] = 1.0
    logits[1, 4000:] = -1.0
    assert [len(kept) for kept in kept_by(SamplingParams(top_k=40), logits)] == [5000, 4000]
    logits = torch.zeros(3000, 5000)
    rows = [Row(SamplingParams(top_k=40), position=i) for i in range(3000)]
    assert len(set(tokens_of(logits, rows))) > 1500  # a window's tokens alone would be a few hundred


def test_top_p_takes_the_crossing_token() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, count in ((0.3, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.9, 4), (0.9999, 4)):
        assert kept_by(SamplingParams(top_p=top_p), probabilities) == [set(range(count))]


def test_top_p_prefers_low_ids_among_equals() -> None:
    flat = torch.zeros(1, 8)
    assert kept_by(SamplingParams(top_p=0.5), flat) == [{0, 1, 2, 3}]
    assert kept_by(SamplingParams(top_p=0.51), flat) == [{0, 1, 2, 3, 4}]
    assert kept_by(SamplingParams(top_p=0.25), torch.zeros(1, 4000)) == [set(range(1000))]


def test_top_p_counts_of_what_top_k_left() -> None:
    probabilities = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
    assert kept_by(SamplingParams(top_p=0.55), probabilities) == [{0, 1}]
    assert kept_by(SamplingParams(top_k=1, top_p=0.99), probabilities) == [{0}]
    probabilities = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert kept_by(SamplingParams(top_p=0.6), probabilities) == [{0, 1}]
    assert kept_by(SamplingParams(top_k=2, top_p=0.6), probabilities) == [{0}]  # 0.625 of the two


def test_min_p_is_relative_to_the_most_probable() -> None:
    probabilities = torch.tensor([[0.5, 0.26, 0.14, 0.1]]).log()
    assert kept_by(SamplingParams(min_p=0.5), probabilities) == [{0, 1}]
    assert kept_by(SamplingParams(min_p=0.25), probabilities) == [{0, 1, 2}]
    assert kept_by(SamplingParams(min_p=1.0), probabilities) == [{0}]


def test_few_possible_tokens() -> None:
    """A grammar's mask, or allowed_token_ids, leaves fewer than top_k."""
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [4, 4000, 2222]] = torch.tensor([0.0, 0.5, -1.0])
    assert kept_by(SamplingParams(top_k=50), logits) == [{4, 4000, 2222}]
    assert kept_by(SamplingParams(top_p=0.999), logits) == [{4, 4000, 2222}]
    assert kept_by(SamplingParams(top_p=0.8), logits) == [{4, 4000}]
    assert kept_by(SamplingParams(min_p=0.5), logits) == [{4, 4000}]
    assert kept_by(SamplingParams(top_k=4999, top_p=0.99), logits) == [{4, 4000, 2222}]


@given(
    rows=st.lists(st.lists(st.integers(-6, 6), min_size=300, max_size=300), min_size=1, max_size=4),
    top_k=st.one_of(st.just(0), st.integers(1, 300)),
    top_p=st.sampled_from([1.0, 0.03, 0.31, 0.57, 0.93, 0.999]),
    min_p=st.sampled_from([0.0, 0.011, 0.07, 0.5]),
)
def test_survivors_of_logits_with_many_ties(rows: list[list[int]], top_k: int, top_p: float, min_p: float) -> None:
    """Against a plain loop in float64."""
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return
    expected = []
    for row in rows:
        order = sorted(range(300), key=lambda i: (-row[i], i))
        weights = [float(torch.tensor(row[i] - row[order[0]], dtype=torch.float64).exp()) for i in order]
        left = [j for j in range(300) if weights[j] >= min_p]
        if top_k:
            left = [j for j in left if row[order[j]] >= row[order[top_k - 1]]]
        mass, before, kept = sum(weights[j] for j in left), 0.0, set()
        for j in left:
            if before < top_p * mass:
                kept.add(order[j])
            before += weights[j]
        expected.append(kept)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    for window in (1, 20, 300):
        assert kept_by(params, torch.tensor(rows, dtype=torch.float32), window) == expected


@pytest.mark.parametrize("vocab_size", [128, 129, 1000, 4096, 20_011])
@pytest.mark.parametrize("width", [1, 5, 128])
def test_the_window_is_the_head_of_a_full_sort(vocab_size: int, width: int) -> None:
    logits = logits_of(5, vocab_size)
    values, ids = top_window(logits, width)
    expected = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :width])
    assert torch.equal(ids, expected.indices[:, :width])


def test_the_window_orders_ties_by_id() -> None:
    logits = torch.randint(0, 50, (6, 2000), generator=torch.Generator().manual_seed(3)).float()
    logits[:, ::7] *= -1
    values, ids = top_window(logits, 300)
    expected = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :300])
    certain = values > values[:, -1:]  # those that tie with the last may be any
    assert certain.sum() > 1000
    assert torch.equal(ids[certain], expected.indices[:, :300][certain])
    assert all(len(set(row.tolist())) == 300 for row in ids)
    whole = top_window(logits, 2000)
    assert torch.equal(whole[1], expected.indices)


def test_sort_keys_order_floats() -> None:
    values = torch.tensor([-torch.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 1e38, torch.inf])
    keys = sort_keys(values, torch.zeros(9, dtype=torch.int64)).tolist()
    assert keys == sorted(keys)
    assert keys[3] == keys[4]
    assert len(set(keys)) == 8
    low, high = sort_keys(torch.tensor([1.0, 1.0]), torch.tensor([3, 200_000])).tolist()
    assert low > high


FLAT_OR_STEEP = [
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.3, temperature=2.0),
    SamplingParams(top_k=20),
    SamplingParams(top_k=500, temperature=3.0),
    SamplingParams(top_k=200, top_p=0.9),
    SamplingParams(min_p=0.001, temperature=2.0),
    SamplingParams(min_p=0.01, top_p=0.7, temperature=2.0),
]


@pytest.mark.parametrize("params", FLAT_OR_STEEP)
def test_both_ways_draw_the_same_token(params: SamplingParams) -> None:
    """The window, whatever its width, and the race of all tokens."""
    logits = logits_of(300, 2000) / params.temperature
    logits[::3] *= 3
    logits[1::3] = logits[1::3].round()  # ties
    restricted = restricted_of(params, 300, 2000)
    hashes = token_hashes(2000, CPU)
    expected = race_all(logits.clone(), Limits.of(logits, restricted), restricted.keys, hashes)
    for window in (1, 17, 128, 1999, 2000):
        tokens, scores = draw_restricted(logits, dataclasses.replace(restricted, window=window), hashes)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(scores, expected[1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("restriction", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_with_a_nan_draws_nothing(sign: float, restriction: dict[str, Any]) -> None:
    """Arithmetic makes NaN of either sign."""
    logits = logits_of(1, 700)
    logits[0, 17] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    assert tokens_of(logits, [Row(SamplingParams(temperature=1.0, **restriction), seed=1)]) == [IMPOSSIBLE_TOKEN]


def test_rows_of_different_kinds_do_not_disturb_each_other() -> None:
    """A flat row needs all tokens, others only a window: each draws as if alone."""
    logits = logits_of(14, 9000)
    logits[::2] = 0.0
    rows = [Row(FLAT_OR_STEEP[i // 2], seed=i) for i in range(14)]
    together = tokens_of(logits, rows)
    assert together == [tokens_of(logits[i : i + 1], [rows[i]])[0] for i in range(14)]


def test_the_window_fits_the_batch() -> None:
    assert restricted_of(SamplingParams(top_k=20), 3, 5000).window == 21
    assert restricted_of(SamplingParams(top_k=20, top_p=0.9), 3, 5000).window == 21
    assert restricted_of(SamplingParams(top_k=2000), 3, 5000).window == MAX_WINDOW
    assert restricted_of(SamplingParams(top_p=0.9), 3, 5000).window == WINDOW
    assert restricted_of(SamplingParams(top_p=0.9), 3, 50).window == 50
