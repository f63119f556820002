"""Draws a token from the whole vocabulary by the Gumbel-max trick: noise is added to each logit, and the largest sum wins."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.sample.noise import bound_from_below, log_exponential, noise_words
from inflight.sample.reductions import argmax_rows, row_chunks

FEW_NUMBERS = 64 * 1024  # a CPU draws from up to this many logits without bounds: more logarithms, but fewer calls

IndexArray = npt.NDArray[np.intp]


def draw_random(logits: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits).

    Args:
        logits: float32 [n, vocab_size], divided by the temperatures; not modified.
        keys: int32 [n, 2], the result of `draw_keys`.
        hashes: int32 [vocab_size], the result of `token_hashes`.

    Returns:
        token ids, int64 [n], and their scores, float32 [n]; the score is -inf or NaN if no token was possible.
    """
    if logits.device.type == "cpu" and logits.numel() > FEW_NUMBERS:
        return draw_by_bounds(logits, keys, hashes)
    scores = logits - log_exponential(noise_words(hashes, keys))
    tokens = argmax_rows(scores)
    return tokens, scores.gather(1, tokens[:, None])[:, 0]


def draw_by_bounds(logits: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """`draw_random` for large batches on a CPU. It needs two thirds of the time of `draw_random`, because it computes exact
    logarithms only for tokens that can win.

    First it computes a cheap upper bound of each score (logit plus noise). The token with the largest bound is the leader. Only
    tokens whose bound is at least the leader's exact score can win. In most rows only the leader can win.
    """
    tokens = np.empty(len(logits), dtype=np.int64)
    scores = np.empty(len(logits), dtype=np.float32)
    words = torch.empty(0, 0, dtype=torch.int32, device="cpu")
    bounds = torch.empty(0, 0, dtype=torch.float32, device="cpu")
    for rows in row_chunks(logits):
        chunk = logits[rows]
        if words.shape != chunk.shape:
            words, bounds = torch.empty_like(chunk, dtype=torch.int32), torch.empty_like(chunk)
        noise_words(hashes, keys[rows], out=words)
        torch.sub(chunk, bound_from_below(words, out=bounds), out=bounds)
        leaders = bounds.numpy().argmax(axis=1)
        leader_scores = _scores(chunk, words, np.arange(len(chunk)), leaders)
        finite = np.isfinite(leader_scores)  # otherwise the row has no possible token, or a logit is NaN
        at_least = np.full_like(leader_scores, np.inf)
        # the margin is larger than any rounding error
        at_least[finite] = leader_scores[finite] - (1e-3 + 1e-5 * np.abs(leader_scores[finite]))
        found_rows, found = np.divmod(np.flatnonzero(bounds.numpy() >= at_least[:, None]), logits.shape[1])
        if len(found) > np.count_nonzero(finite):  # tokens other than the leaders can win
            found_scores = _scores(chunk, words, found_rows, found)
            order = np.lexsort((found, -found_scores, found_rows))
            contested, first = np.unique(found_rows[order], return_index=True)
            leaders[contested], leader_scores[contested] = found[order[first]], found_scores[order[first]]
        tokens[rows], scores[rows] = leaders, leader_scores
    return torch.from_numpy(tokens), torch.from_numpy(scores)


def _scores(logits: Tensor, words: Tensor, rows: IndexArray, columns: IndexArray) -> npt.NDArray[np.float32]:
    where = torch.from_numpy(rows), torch.from_numpy(columns)
    scores: npt.NDArray[np.float32] = (logits[where] - log_exponential(words[where])).numpy()
    return scores
