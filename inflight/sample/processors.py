"""What changes logits before the draw, in place and sparsely; in the order of the functions below.

The order and the arithmetic are vLLM's and transformers'. Constraints are of two kinds. `allowed_token_ids` (like a grammar's
mask, applied before) is a wall. Bans, of bad_words and then of min_tokens, yield: where one would leave a row without any
token, it is lifted for that row, so that "only end tokens are allowed, but min_tokens forbids them" ends the request instead
of drawing something that is not allowed. What remains impossible even so, the sampler reports (`IMPOSSIBLE_TOKEN`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.sample.metadata import (
    AllowedTokens,
    Bans,
    LogitBias,
    OutputPenalties,
    RepetitionPenalties,
    SamplingMetadata,
)


def process_logits(logits: Tensor, metadata: SamplingMetadata) -> None:
    """Apply to `logits` (float32 [num_rows, vocab_size], contiguous) all that `metadata` asks for but the draw."""
    flat = logits.view(-1)
    if metadata.allowed:
        apply_allowed_tokens(logits, metadata.allowed)
    if metadata.bias is not None:
        apply_bias(flat, metadata.bias)
    for bans in (metadata.bad_words, metadata.min_tokens):
        if bans is not None:
            apply_bans(logits, bans)
    if metadata.repetition is not None:
        apply_repetition_penalties(flat, metadata.repetition)
    if metadata.output_penalties is not None:
        apply_output_penalties(flat, metadata.output_penalties)


def apply_allowed_tokens(logits: Tensor, allowed: Sequence[AllowedTokens]) -> None:
    for tokens in allowed:
        row = logits[tokens.row]
        kept = row[tokens.token_ids]
        row.fill_(-torch.inf)
        row[tokens.token_ids] = kept


def apply_bias(flat: Tensor, bias: LogitBias) -> None:
    flat.scatter_(0, bias.entries, flat[bias.entries] + bias.values)


def apply_bans(logits: Tensor, bans: Bans) -> None:
    flat = logits.view(-1)
    before = flat[bans.entries]
    flat.index_fill_(0, bans.entries, -torch.inf)
    banned_rows = logits if len(bans.rows) == len(logits) else logits[bans.rows]
    lifted = (banned_rows.amax(dim=1) == -torch.inf)[bans.owners]
    flat.scatter_(0, bans.entries, torch.where(lifted, before, -torch.inf))


def apply_repetition_penalties(flat: Tensor, repetition: RepetitionPenalties) -> None:
    """Keskar et al. 2019 (CTRL): divide positive logits, multiply negative ones. A repeated entry writes one value twice."""
    before = flat[repetition.entries]
    penalised = torch.where(before > 0, before / repetition.penalties, before * repetition.penalties)
    flat.scatter_(0, repetition.entries, penalised)


def apply_output_penalties(flat: Tensor, output: OutputPenalties) -> None:
    flat.scatter_(0, output.entries, flat[output.entries] - output.penalties)
