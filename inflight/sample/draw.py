"""Draws a token from the whole vocabulary by the Gumbel-max trick: noise is added to each logit, and the largest sum wins."""

import numpy as np
import torch
from torch import Tensor

from inflight.sample.draw_by_bounds import draw_by_bounds
from inflight.sample.noise import log_exponential, noise_words

FEW_NUMBERS = 64 * 1024  # a CPU draws from up to this many logits without bounds: more logarithms, but fewer calls


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
    return largest_of_rows(logits - log_exponential(noise_words(hashes, keys)))


def largest_of_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each row's largest value, int64 [n], and this value, [n]. On a tie it is the first column. A NaN counts as
    the largest.

    On a CPU numpy is ten times as fast as torch, and on a tie it also returns the first index.
    """
    if values.device.type == "cpu":
        array = values.numpy()
        found = array.argmax(axis=1)
        return torch.from_numpy(found), torch.from_numpy(array[np.arange(len(array)), found])
    columns = values.argmax(dim=1)
    return columns, values.gather(1, columns[:, None])[:, 0]
