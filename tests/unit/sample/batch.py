"""A step's sampling rows as tests write them: each a SamplingParams, its tokens and its seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inflight.interface.request import ResolvedSampling
from inflight.sample.processors import LogitsProcessors
from inflight.sample.rows import GrammarMasks, SamplingMetadata
from inflight.sample.sampler import Sampler, SamplerOutput
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NOT_YET = 10**9  # what history holds behind a draw: nobody may look at it


@dataclass(frozen=True)
class Row:
    params: SamplingParams = field(default_factory=lambda: GREEDY)
    seed: int = 0
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    position: int | None = None  # None: after prompt and output

    @property
    def resolved(self) -> ResolvedSampling:
        return ResolvedSampling(
            params=self.params,
            seed=self.seed,
            max_tokens=1000,
            stop_token_ids=frozenset(self.stop_token_ids),
            bad_words_token_ids=tuple(map(tuple, self.bad_words)),
        )


def step_of(
    rows: Sequence[Row], vocab_size: int, masks: GrammarMasks | None = None
) -> tuple[SamplingMetadata, LogitsProcessors | None, Tensor]:
    """What the sampler takes beside the logits. Rows go to slots in reverse order: a slot taken for a row is noticed."""
    num_rows = len(rows)
    state = SamplingState(num_rows + 1, vocab_size, "cpu")
    longest = max((len(row.prompt) + len(row.output) for row in rows), default=0)
    history = torch.full((num_rows + 1, longest + 2), NOT_YET, dtype=torch.int32)
    slots = np.arange(num_rows, 0, -1, dtype=np.int32)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        state.add(slot, row.resolved)
        history[slot, : len(row.prompt) + len(row.output)] = torch.tensor([*row.prompt, *row.output])
    num_prompt = np.array([len(row.prompt) for row in rows], dtype=np.int32)
    num_tokens = num_prompt + np.array([len(row.output) for row in rows], dtype=np.int32)
    positions = np.array(
        [n if row.position is None else row.position for n, row in zip(num_tokens.tolist(), rows, strict=True)],
        dtype=np.int32,
    )
    taken = state.take(slots)
    return (
        taken.metadata(positions),
        LogitsProcessors.of(taken, positions, num_prompt, masks, torch.from_numpy),
        history,
    )


def sample(logits: Tensor, rows: Sequence[Row], masks: GrammarMasks | None = None) -> SamplerOutput:
    vocab_size = logits.shape[1]
    return Sampler(vocab_size, "cpu")(logits.clone(), *step_of(rows, vocab_size, masks))


def tokens_of(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    token_ids = sample(logits, rows).token_ids
    assert token_ids.dtype == torch.int32
    return token_ids.tolist()


def processed(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The logits as they come to the draw, before temperature."""
    logits = logits.clone()
    _, processors, history = step_of(rows, logits.shape[1])
    if processors is not None:
        processors.apply(logits, history)
    return logits
