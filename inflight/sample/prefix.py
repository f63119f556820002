"""`race_all`: draws from the tokens that pass min_p, top_k and top_p, if the window of candidates.py may be too small for them.

If all tokens are ordered by falling logit, then rising id, the tokens that pass are a prefix. All tokens race: the token with
the largest noisy score wins. If the winner is not in the prefix, the winner and all tokens after it are removed, and the race
is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.sample.draw import draw_random
from inflight.sample.reductions import softmax_mass
from inflight.sample.rows import RestrictedRows


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each row. `vocab_mass` is the sum of exp(logit - max) over the vocabulary."""

    vocab_size: int
    top_k: Tensor  # int64 [n, 1]
    top_p: Tensor  # float64 [n, 1]
    log_min_p: Tensor  # float32 [n, 1]
    floored: Tensor  # bool [n, 1]: whether top_k or min_p removes tokens below some logit (the floor)
    vocab_mass: Tensor  # float64 [n, 1], computed only for rows that are not `floored`: their top_p is a share of it

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
        return Limits(
            self.vocab_size,
            self.top_k[rows],
            self.top_p[rows],
            self.log_min_p[rows],
            self.floored[rows],
            self.vocab_mass[rows],
        )


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
        columns = torch.arange(self.logits.shape[1], device=self.logits.device)
        return (self.logits > logit) | ((self.logits == logit) & (columns < tokens))
