"""A step's sampling rows as tests write them: each a SamplingParams, its tokens and its seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.interface.request import ResolvedSampling
from inflight.sample.metadata import SamplingMetadata
from inflight.sample.processors import process_logits
from inflight.sample.sampler import Sampler, SamplerOutput
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Row:
    params: SamplingParams = GREEDY
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


def metadata_of(rows: Sequence[Row], vocab_size: int) -> SamplingMetadata:
    """Rows go to slots in reverse order, so that a slot taken for a row is noticed."""
    num_rows = len(rows)
    state = SamplingState(num_rows + 1, vocab_size, "cpu")
    longest = max((len(row.prompt) + len(row.output) for row in rows), default=0)
    token_ids = np.full((num_rows + 1, longest + 2), 1, dtype=np.int32)
    slots = np.arange(num_rows, 0, -1, dtype=np.int32)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        state.add(slot, row.resolved)
        tokens = [*row.prompt, *row.output]
        token_ids[slot, : len(tokens)] = tokens
    num_prompt = np.array([len(row.prompt) for row in rows], dtype=np.int32)
    num_tokens = num_prompt + np.array([len(row.output) for row in rows], dtype=np.int32)
    positions = [n if row.position is None else row.position for n, row in zip(num_tokens.tolist(), rows, strict=True)]
    taken = state.take(slots)
    built = taken.metadata(np.array(positions, dtype=np.int32), num_prompt)
    history = taken.history(num_prompt, num_tokens)
    return built if history is None else history.add_to(built, token_ids, torch.device("cpu"))


def sample(logits: Tensor, rows: Sequence[Row]) -> SamplerOutput:
    vocab_size = logits.shape[1]
    return Sampler(vocab_size, "cpu")(logits.clone(), metadata_of(rows, vocab_size))


def tokens_of(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    token_ids = sample(logits, rows).token_ids
    assert token_ids.dtype == torch.int32
    return token_ids.tolist()


def processed(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The logits as they come to the draw, before temperature."""
    logits = logits.clone()
    process_logits(logits, metadata_of(rows, logits.shape[1]))
    return logits
