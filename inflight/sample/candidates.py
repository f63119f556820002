"""Draws from the tokens that pass min_p, top_k and top_p, without a sort of the whole vocabulary.

The filters, on logits already divided by the temperature, in this order:

    min_p   keep p >= min_p * max(p)
    top_k   keep the k most probable tokens, and all tokens that tie with the k-th
    top_p   renormalise the probabilities of the remaining tokens, order these tokens by falling probability, then rising id,
            and keep the shortest prefix whose probabilities add up to top_p

If all tokens are ordered by falling probability, then rising id, the tokens that pass the filters are a prefix. First only a
window of the most probable tokens is examined. If the prefix ends inside the window, the tokens of the prefix race: each token
gets a noisy score, and the largest score wins (draw.py). If the prefix is longer (a flat distribution, a large k), all tokens
of the vocabulary race. If the winner is not in the prefix, the winner and all tokens after it are removed, and the race is
repeated. Both methods use the same noise and the same sums. So a row's token depends neither on the method nor on the other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.sample.draw import draw_random, largest_of_rows
from inflight.sample.noise import log_exponential, noise_words
from inflight.sample.reductions import row_chunks, softmax_mass, top_window
from inflight.sample.rows import RestrictedRows


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each row. `vocab_mass` is the sum of exp(logit - max) over the vocabulary. If neither top_k nor min_p
    removes tokens, top_p is a share of this sum."""

    vocab_size: int
    top_k: Tensor  # int64 [n, 1]
    top_p: Tensor  # float64 [n, 1]
    log_min_p: Tensor  # float32 [n, 1]
    floored: Tensor  # bool [n, 1]: whether top_k or min_p removes tokens below some logit (the floor)
    vocab_mass: Tensor  # float64 [n, 1], computed only for rows that are not `floored`, as they need it for top_p

    @staticmethod
    def of(logits: Tensor, restricted: RestrictedRows) -> Limits:
        vocab_size = logits.shape[1]
        floored = (restricted.top_k < vocab_size) | (restricted.log_min_p > -torch.inf)
        vocab_mass = torch.zeros_like(restricted.top_p)
        open_rows = (~floored[:, 0]).nonzero()[:, 0]
        if len(open_rows):
            open_logits = logits if len(open_rows) == len(logits) else logits[open_rows]
            vocab_mass[open_rows] = softmax_mass(open_logits).to(torch.float64)
        return Limits(vocab_size, restricted.top_k, restricted.top_p, restricted.log_min_p, floored, vocab_mass)

    def rows(self, rows: Tensor | slice) -> Limits:
        columns = self.top_k, self.top_p, self.log_min_p, self.floored, self.vocab_mass
        return Limits(self.vocab_size, *(column[rows] for column in columns))


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
    best, scores = largest_of_rows(race)
    tokens = ids.gather(1, best[:, None])[:, 0]
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
    top = values[:, :1]
    last = values[:, -1:]
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


def race_all(logits: Tensor, limits: Limits, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw_restricted`, but without a window: race all tokens and test the winner. Overwrites `logits`."""
    prefix = Prefix.of(logits, limits)
    while True:
        tokens, scores = draw_random(logits, keys, hashes)
        held = prefix.holds(tokens[:, None])
        if bool(held.all()):
            return tokens, scores
        logits.masked_fill_(~held & ~prefix.before(tokens[:, None]), -torch.inf)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tests whether a token is in the prefix: the weights of the tokens before it must add up to less than `share`.

    The object uses the memory of the logits from which it was made. Logits outside the prefix may be overwritten with -inf.
    """

    logits: Tensor  # float32 [n, vocab_size]; -inf for tokens that min_p or top_k removes
    weights: Tensor  # float32 [n, vocab_size], exp(logit - max) of these logits
    share: Tensor  # float64 [n, 1]: top_p times the sum of the weights

    @staticmethod
    def of(logits: Tensor, limits: Limits) -> Prefix:
        """Make the prefixes of all rows. Overwrites `logits`."""
        top = logits.amax(dim=1, keepdim=True)
        mass = limits.vocab_mass
        if bool(limits.floored.any()):
            has_top_k = limits.top_k < limits.vocab_size
            floor = top + limits.log_min_p
            k = int(torch.where(has_top_k, limits.top_k, 1).max())
            kth = torch.topk(logits, k, dim=1).values.gather(1, limits.top_k.clamp(max=k) - 1)
            floor = torch.where(has_top_k, torch.maximum(floor, kth), floor)
            logits.masked_fill_(logits < floor, -torch.inf)
        weights = (logits - top).exp_()
        if bool(limits.floored.any()):
            mass = torch.where(limits.floored, weights.sum(dim=1, keepdim=True, dtype=torch.float64), mass)
        return Prefix(logits, weights, limits.top_p * mass)

    def holds(self, tokens: Tensor) -> Tensor:
        """Whether each row's token, int64 [n, 1], is in the prefix: bool [n, 1]. True for the most probable token, and for a
        row without any possible token."""
        logit = self.logits.gather(1, tokens)
        upto = torch.ge(self.logits, logit, out=torch.empty_like(self.logits)).mul_(self.weights)
        weight = upto.sum(dim=1, keepdim=True, dtype=torch.float64) - self.weights.gather(1, tokens)
        # `weight` also counts later tokens with an equal logit, so it may be too large: only True is certain
        held = weight < self.share
        if bool(held.all()):
            return held
        weight = torch.where(self.before(tokens), self.weights, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
        return (weight < self.share) | (weight == 0) | weight.isnan()

    def before(self, tokens: Tensor) -> Tensor:
        """Which tokens come before each row's token, if ordered by falling logit, then rising id: bool [n, vocab_size]."""
        logit = self.logits.gather(1, tokens)
        columns = torch.arange(self.logits.shape[1], dtype=torch.int64, device=self.logits.device)
        return (self.logits > logit) | ((self.logits == logit) & (columns < tokens))
