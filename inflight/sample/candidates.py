"""Draws from the tokens that pass min_p, top_k and top_p, without a sort of the whole vocabulary.

The filters, on logits already divided by the temperature, in this order:

    min_p   keep p >= min_p * max(p)
    top_k   keep the k most probable tokens, and all tokens that tie with the k-th
    top_p   renormalise the probabilities of the remaining tokens, order these tokens by falling probability, then rising id,
            and keep the shortest prefix whose probabilities add up to top_p

If all tokens are ordered in this way, the tokens that pass the filters are a prefix. First only a window of the most probable
tokens is examined. If the prefix ends inside the window, its tokens race: each token gets a noisy score, and the largest score
wins (draw.py). If the prefix is longer (a flat distribution, a large k), all tokens of the vocabulary race (prefix.py). Both
methods use the same noise and the same sums. So a row's token depends neither on the method nor on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.sample.noise import log_exponential, noise_words
from inflight.sample.prefix import Limits, race_all
from inflight.sample.reductions import argmax_rows, row_chunks, top_window
from inflight.sample.rows import RestrictedRows


def draw_restricted(logits: Tensor, restricted: RestrictedRows, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Waits for the device, because the host must know for which rows the window was wide enough.

    Args:
        logits: float32 [n, vocab_size], the rows of `restricted`, divided by their temperatures; not modified.
        hashes: int32 [vocab_size], the result of `token_hashes`.

    Returns:
        token ids, int64 [n], and their scores, float32 [n]; the score is -inf or NaN if no token was possible.
    """
    limits = Limits.of(logits, restricted)
    values, ids = top_window(logits, restricted.window)
    kept, decided = survivors(values, limits)
    noise = log_exponential(noise_words(hashes[ids], restricted.keys))
    race = torch.where(kept, values - noise, -torch.inf)
    best = argmax_rows(race)[:, None]
    tokens, scores = ids.gather(1, best)[:, 0], race.gather(1, best)[:, 0]
    undecided = (~decided).nonzero()[:, 0]
    if len(undecided):
        left = logits[undecided]
        for chunk in row_chunks(left):
            rows = undecided[chunk]
            tokens[rows], scores[rows] = race_all(left[chunk], limits.rows(rows), restricted.keys[rows], hashes)
    return tokens, scores


def survivors(values: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Find which tokens of a window pass the filters, and for which rows the window was wide enough to decide this.

    Args:
        values: float32 [n, C], the values of `top_window`, where C is the width of the window.

    Returns:
        kept: bool [n, C], whether a token passes; true for a prefix of each row.
        decided: bool [n], whether the window was wide enough.
    """
    width = values.shape[1]
    top, last = values[:, :1], values[:, -1:]
    kth = values.gather(1, limits.top_k.clamp(max=width) - 1)
    kth = torch.where(limits.top_k <= width, kth, -torch.inf)
    floor = torch.maximum(kth, top + limits.log_min_p)
    kept = (values >= floor) & (values > -torch.inf)
    # true for rows in which every token outside the window is below the floor
    complete = (last < floor) | (last == -torch.inf) if width < limits.vocab_size else torch.ones_like(limits.floored)

    weights = torch.where(kept, (values - top).exp_(), 0.0).to(torch.float64)
    upto = weights.cumsum(dim=1)
    mass = torch.where(limits.floored, upto[:, -1:], limits.vocab_mass)
    kept &= upto - weights < limits.top_p * mass  # a token is kept if the tokens before it do not reach top_p
    num_kept = kept.sum(dim=1, keepdim=True)
    cut_inside = values.gather(1, (num_kept - 1).clamp_(min=0)) > last
    return kept, (complete | (cut_inside & ~limits.floored))[:, 0]
