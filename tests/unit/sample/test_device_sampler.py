"""Draws by the GPU's kernels, in Triton's interpreter: the tokens of the CPU's Sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.sample.device_sampler import DeviceSampler
from inflight.sample.sampler import IMPOSSIBLE_TOKEN
from inflight.sampling_params import SamplingParams
from tests.conftest import FULL_GPU
from tests.unit.sample.batch import GREEDY, Row, tokens_of
from tests.unit.sample.device_batch import DEVICE, assert_same_tokens, columns_of, device_tokens_of

SIZES = {"block_size": 64, "group_size": 8, "search_block_size": 256}

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 1e-6, 0.3, 0.7, 1.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 20, 90, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 1e-3, 0.1, 1.0]),
)
rows = st.builds(
    Row,
    params,
    seed=st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**63, 2**64 - 1]),
    position=st.integers(0, 2**31 - 1) | st.integers(0, 3),
)
kinds = st.sampled_from(["normal", "normal", "flat", "steep", "equal", "few", "none", "nan", "inf"])


def logits_of(kind: str, vocab_size: int, seed: int) -> Tensor:
    """As a model's, in bfloat16: so many are equal."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    logits *= {"flat": 0.05, "steep": 40.0, "equal": 0.0}.get(kind, 2.5)
    if kind == "few":
        logits[torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed + 1)) < 0.9] = -torch.inf
    if kind == "none":
        logits[:] = -torch.inf
    logits = logits.bfloat16().float()
    if kind == "nan":
        logits[seed % vocab_size] = torch.nan
    if kind == "inf":
        logits[seed % vocab_size] = torch.inf
    return logits


@settings(max_examples=100 if FULL_GPU else 10, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.tuples(rows, kinds), min_size=1, max_size=5),
    st.integers(1, 300) | st.sampled_from([1, 63, 64, 65, 256, 700]),
    st.integers(0, 2**30),
    st.sampled_from([SIZES, {"block_size": 256, "group_size": 64, "search_block_size": 128}]),
)
def test_tokens_are_the_cpus(drawn: list[tuple[Row, str]], vocab_size: int, seed: int, sizes: dict[str, int]) -> None:
    logits = torch.stack([logits_of(kind, vocab_size, seed + i) for i, (_, kind) in enumerate(drawn)])
    assert_same_tokens(logits, [row for row, _ in drawn], **sizes)


def test_close_calls_are_rare() -> None:
    generator = np.random.default_rng(3)
    many = [
        Row(
            SamplingParams(
                temperature=0.8, top_k=int(generator.integers(0, 40)), top_p=float(generator.uniform(0.3, 1))
            ),
            seed=i,
            position=i,
        )
        for i in range(10)
    ]
    logits = torch.randn(len(many), 250, generator=torch.Generator().manual_seed(1)) * 2
    assert assert_same_tokens(logits, many, **SIZES) <= 1


def test_draws_follow_softmax() -> None:
    num_draws, probabilities = 300, torch.tensor([0.4, 0.0, 0.25, 0.05, 0.2, 0.1])
    same = Row(SamplingParams(), seed=2**64 - 5)
    sampler = DeviceSampler(6, num_draws, DEVICE, block_size=8, group_size=8, search_block_size=8)
    columns, _ = columns_of([same], 6)
    tokens = torch.empty(num_draws, dtype=torch.int32, device=DEVICE)
    slots, positions = torch.ones_like(tokens), torch.arange(num_draws, dtype=torch.int32, device=DEVICE)
    sampler.draw(probabilities.log().repeat(num_draws, 1).to(DEVICE), columns, slots, positions, tokens)
    counts = torch.bincount(tokens.cpu(), minlength=6)
    assert counts[1] == 0
    expected = probabilities * num_draws
    chi_square = ((counts - expected) ** 2 / expected)[probabilities > 0].sum()
    assert chi_square < 23.5  # the 99.99 % quantile of 4 degrees of freedom


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.7, 0.1, 0.9])
def test_of_equal_tokens_top_p_keeps_the_first(top_p: float, top_k: int) -> None:
    """Shares that are met exactly: with top_p = 0.7, seven of ten equal tokens are kept."""
    logits = torch.zeros(5, 30).index_fill_(1, torch.arange(3, 23), -30.0)
    num_kept = -int(-top_p * 10 // 1)
    many = [Row(SamplingParams(top_p=top_p, top_k=top_k), seed=i) for i in range(5)]
    found = device_tokens_of(logits, many, 16, 4, 8)  # so that the equal ones are in several search blocks
    kept = [0, 1, 2, *range(23, 30)][:num_kept]
    assert set(found) <= set(kept) and (len(set(found)) > 1 or num_kept == 1)
    assert found == tokens_of(logits, many)


def test_top_p_is_a_share_of_what_min_p_leaves() -> None:
    """min_p leaves four equal tokens. Two of them have 45 % of their probability, three have 45 % of that of all tokens."""
    logits = torch.tensor([0.15] * 4 + [0.01] * 40).log().repeat(12, 1)
    many = [Row(SamplingParams(min_p=0.5, top_p=0.45), seed=i) for i in range(12)]
    found = device_tokens_of(logits, many, 16, 4, 8)
    assert set(found) == {0, 1}
    assert found == tokens_of(logits, many)


def test_a_flat_row_of_top_p_lists_groups_until_its_share_is_reached() -> None:
    """Some 450 of 700 tokens are kept: neither the first 64 groups nor only a few more hold them."""
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(5)) * 0.4
    many = [Row(SamplingParams(top_p=p), seed=i) for i, p in enumerate([0.3, 0.75, 0.95, 1 - 1e-9])]
    assert assert_same_tokens(logits, many, block_size=64, group_size=2, search_block_size=512) == 0


def test_greedy_takes_the_first_of_equals_and_no_nan() -> None:
    logits = torch.full((6, 150), -2.0)
    logits[0, [149, 70, 71]] = 3.0
    logits[1, [130, 5]] = torch.tensor([0.0, -0.0])
    logits[2] = -torch.inf
    logits[3, 149] = torch.nan
    logits[4] = -torch.finfo(torch.float32).max
    logits[5, 7] = torch.inf
    none = IMPOSSIBLE_TOKEN
    assert device_tokens_of(logits, [Row(GREEDY)] * 6, **SIZES) == [70, 5, none, none, 0, none]


def test_slots_come_twice_and_that_never_written_is_greedy() -> None:
    two = [Row(SamplingParams(), seed=11), Row(SamplingParams(top_k=9), seed=12)]
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(2))
    columns, slots = columns_of(two, 90)
    slots = torch.cat([slots, slots, torch.full_like(slots[:1], columns.shape[1] - 1)])
    positions = [4, 5, 2**31 - 1, 6, 0]
    tokens = torch.empty_like(slots)
    DeviceSampler(90, 8, DEVICE, **SIZES).draw(
        logits.to(DEVICE), columns, slots, torch.tensor(positions, dtype=torch.int32, device=DEVICE), tokens
    )
    as_rows = [Row(two[i % 2].params, two[i % 2].seed, position=positions[i]) for i in range(4)]
    assert tokens.tolist() == tokens_of(logits, [*as_rows, Row(GREEDY)])


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    columns, _ = columns_of([], 10)
    DeviceSampler(10, 1, DEVICE).draw(torch.empty(0, 10, device=DEVICE), columns, empty, empty, empty)


def test_parameters_of_a_greedy_request_are_zeros() -> None:
    words = DeviceSampler.parameters(Row(GREEDY, seed=5).resolved, 100)
    assert words.shape == (DeviceSampler.NUM_COLUMNS,) and words.dtype == np.int32 and not words.any()


def test_what_does_not_fit_is_refused() -> None:
    sampler = DeviceSampler(10, 1, DEVICE)
    columns, slots = columns_of([Row(GREEDY)] * 2, 10)
    tokens = torch.empty(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError):
        sampler.draw(torch.zeros(2, 10, device=DEVICE), columns, slots, tokens, tokens)  # more than it has memory for
    with pytest.raises(AssertionError):
        sampler.draw(torch.zeros(1, 11, device=DEVICE), columns, slots[:1], tokens[:1], tokens[:1])
