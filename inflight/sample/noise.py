"""The noise of the draws: one Gumbel variate per (seed, position, token id), computed by a hash when it is needed.

A token is drawn by the Gumbel-max trick: argmax(logits / T - log E) with E ~ Exp(1) independent per token id is distributed
as softmax(logits / T) (Gumbel 1954; Maddison, Tarlow, Minka 2014). This is better than inverting the cumulative distribution,
because a tiny change of the logits changes the token only if the two best scores were almost equal.

The noise is a hash of the token id and the draw's two keys (seeds.draw_keys). So it does not depend on the other rows of the
batch, on the vocabulary's size or on which tokens top-k has removed. The code for every device uses this definition:

    hash = (mix32(token_id) ^ key0) * key1;  hash = (hash ^ hash >> 16) * C;  u = low 31 bits / 2**31;  E = -log(1 - u)

Tokens with a small E win. So a small E is computed with the full relative precision of a float32, down to 2**-32.
"""

import numpy as np
import torch
from torch import Tensor

_MULTIPLIER = 0x7FEB352D  # from Wellons' hash "lowbias32", which was found by a search for the least bias
_LOW_31 = 0x7FFFFFFF
_SMALLEST = 2.0**-32  # used for a hash of 0
_LARGEST = 1.0 - 2.0**-24  # the largest float32 below 1: E <= 16.7


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """mix32 (lowbias32) of every token id, int32 [vocab_size]: the part of the noise that all draws share."""
    ids = np.arange(vocab_size, dtype=np.uint32)
    ids = (ids ^ (ids >> np.uint32(16))) * np.uint32(0x7FEB352D)
    ids = (ids ^ (ids >> np.uint32(15))) * np.uint32(0x846CA68B)
    return torch.from_numpy((ids ^ (ids >> np.uint32(16))).view(np.int32)).to(device)


def noise_words(hashes: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """The hash of each token under each draw's keys: uniform on [0, 2**31), int32 [n, m].

    Args:
        hashes: int32 [m] or [n, m], the `token_hashes` of the tokens.
        keys: int32 [n, 2], the result of `draw_keys`.
    """
    words = torch.bitwise_xor(hashes, keys[:, :1], out=out)
    words.mul_(keys[:, 1:])
    words.bitwise_xor_(words.bitwise_right_shift(16).bitwise_and_(0xFFFF))  # 0xFFFF removes copies of the sign bit
    return words.mul_(_MULTIPLIER).bitwise_and_(_LOW_31)


def log_exponential(words: Tensor) -> Tensor:
    """log E of each word of `noise_words`, float32. It is subtracted from the token's logit."""
    return words.to(torch.float32).mul_(-(2.0**-31)).clamp_(-_LARGEST, -_SMALLEST).log1p_().neg_().log_()
