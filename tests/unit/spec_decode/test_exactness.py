"""Draws with drafts equal draws without, token by token: the sampler, its history and masks, and the verification together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.config.speculative import SpeculativeConfig
from inflight.interface.request import Int32Array
from inflight.sample.processors import LogitsProcessors
from inflight.sample.rows import GrammarMasks
from inflight.sample.sampler import Sampler
from inflight.sample.state import SamplingState
from inflight.sample.verification import emitted_rows, num_emitted
from inflight.sampling_params import SamplingParams
from inflight.spec_decode.make_proposer import PROPOSERS
from tests.support.plans import new_request
from tests.unit.sample.batch import Row

VOCAB_SIZE, MAX_MODEL_LEN, K = 12, 48, 3
PROMPT = [1, 2, 3, 1, 2]
Propose = Callable[[Int32Array, Int32Array, Int32Array], Int32Array]

ROWS = [
    Row(SamplingParams(temperature=0.0), prompt=PROMPT),
    Row(SamplingParams(temperature=0.6, frequency_penalty=0.3, repetition_penalty=1.2), seed=3, prompt=PROMPT),
    Row(SamplingParams(temperature=0.8, top_p=0.8, min_tokens=9), seed=5, prompt=PROMPT[:2], stop_token_ids=[1, 4]),
    Row(SamplingParams(temperature=0.3), seed=7, prompt=PROMPT, bad_words=[[1, 2], [3]]),
]
UNDER_A_GRAMMAR = [1, 3]  # rows


def target(tokens: list[int]) -> torch.Tensor:
    """The logits behind `tokens`: of the last two only, so that texts repeat themselves."""
    seed = tokens[-1] * VOCAB_SIZE + tokens[-2]
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def mask_at(position: int) -> int:
    return 0xF7F if position % 3 else 0x7E  # as a function of what is before; here of how much


def nothing(token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
    return np.full((len(slots), K), -1, dtype=np.int32)


def generate(propose: Propose) -> tuple[list[list[int]], int]:
    """The texts, and the number of steps they took."""
    state = SamplingState(len(ROWS), VOCAB_SIZE, "cpu")
    sampler = Sampler(VOCAB_SIZE, "cpu")
    token_ids = np.full((len(ROWS), MAX_MODEL_LEN), 7, dtype=np.int32)
    num_prompt = np.array([len(row.prompt) for row in ROWS], dtype=np.int32)
    num_tokens = num_prompt.copy()
    for slot, row in enumerate(ROWS):
        state.add(slot, row.resolved)
        token_ids[slot, : len(row.prompt)] = row.prompt
    num_steps = 0
    while len(slots := np.flatnonzero(num_tokens < MAX_MODEL_LEN).astype(np.int32)):
        num_steps += 1
        drafts = propose(token_ids, slots, num_tokens[slots])
        num_drafts = (drafts >= 0).sum(axis=1)
        query_start_loc = np.append(0, np.cumsum(num_drafts + 1)).astype(np.int32)
        owners = np.repeat(np.arange(len(slots)), num_drafts + 1)
        positions = num_tokens[slots][owners] + np.arange(len(owners)) - query_start_loc[owners]
        for slot, row, count in zip(slots, drafts, num_drafts, strict=True):
            token_ids[slot, num_tokens[slot] : num_tokens[slot] + count] = row[:count]
        rows = state.take(slots).take(owners)
        logits = torch.stack(
            [target(token_ids[slot, :end].tolist()) for slot, end in zip(rows.slots, positions, strict=True)]
        )
        masked = np.flatnonzero(np.isin(rows.slots, UNDER_A_GRAMMAR))
        words = np.array([mask_at(position) for position in positions[masked]], dtype=np.int32)[:, None]
        masks = GrammarMasks(rows=masked, masks=words)
        processors = LogitsProcessors.of(rows, positions, num_prompt[rows.slots], masks, torch.from_numpy)
        sampled = sampler(logits, rows.metadata(positions), processors, torch.from_numpy(token_ids)).token_ids
        count = num_emitted(sampled, torch.from_numpy(drafts), query_start_loc).numpy()
        emitted = emitted_rows(count, query_start_loc)
        token_ids[rows.slots[emitted], positions[emitted]] = sampled.numpy()[emitted]
        num_tokens[slots] += count.astype(np.int32)
    return token_ids.tolist(), num_steps


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], int]:
    return generate(nothing)


@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig(method="ngram", num_speculative_tokens=K, prompt_lookup_min=1, prompt_lookup_max=3),
        SpeculativeConfig(method="suffix", num_speculative_tokens=K),
    ],
    ids=lambda config: config.method,
)
def test_with_a_proposer(plain: tuple[list[list[int]], int], config: SpeculativeConfig) -> None:
    proposer = PROPOSERS[config.method](config, "cpu")
    proposer.begin([new_request(slot, row.prompt) for slot, row in enumerate(ROWS)])
    texts, num_steps = generate(proposer.propose)
    assert texts == plain[0]
    assert num_steps < plain[1]


@given(data=st.data())
def test_whatever_is_proposed(plain: tuple[list[list[int]], int], data: st.DataObject) -> None:
    """The right tokens, wrong ones in their midst, none, and any number of them."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    truth, wrong = np.array(plain[0], dtype=np.int32), data.draw(st.sampled_from([0.0, 0.2, 0.7]))

    def propose(token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        drafts = nothing(token_ids, slots, num_tokens)
        for row, slot, known in zip(drafts, slots, num_tokens, strict=True):
            count = int(generator.integers(0, min(K, MAX_MODEL_LEN - 1 - known) + 1))
            row[:count] = truth[slot, known : known + count]
            changed = generator.random(count) < wrong
            row[:count][changed] = generator.integers(0, VOCAB_SIZE, size=count)[changed]
        return drafts

    assert generate(propose)[0] == plain[0]


def test_masks_bind(plain: tuple[list[list[int]], int]) -> None:
    for row in UNDER_A_GRAMMAR:
        for position in range(len(ROWS[row].prompt), MAX_MODEL_LEN):
            assert mask_at(position) >> plain[0][row][position] & 1
