"""Seeds and draw keys: the noise of a draw is a pure function of (seed, position). This module does not import torch.

A front end accepts requests from users. Several front ends may share one engine. The seeds are derived like this:

engine seed --front_end_seed(seed, index)--> seed of front end `index`
front end's seed --derive_seed(seed, number)--> seed of its request `number`, if the request has none
request seed --derive_seed(seed, index)--> seed of completion `index`   (n > 1)
(seed, position) --draw_keys--> two 32-bit keys --noise.py--> one Gumbel variate per token id
"""

import hashlib
import secrets

import numpy as np
import numpy.typing as npt

MASK64 = 2**64 - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request with this `seed`, in [0, 2**64). Completion 0 has the request's seed.

    So a seed gives the same tokens for n=1 and for completion 0 of n > 1. In the same way, a front end derives the seed of its
    request number `index` from its own seed.
    """
    assert index >= 0, f"the index {index} is negative"
    if index == 0:
        return seed & MASK64
    digest = hashlib.sha256(f"inflight seed {seed & MASK64} child {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def front_end_seed(seed: int | None, index: int) -> int:
    """The seed of front end `index`, in [0, 2**64). The front end derives seeds from it for requests that have none.

    Args:
        seed: the engine's seed. If it is None, each call returns a random seed from the operating system.
        index: the number of the front end. Front end 0 has the engine's seed itself. So an engine with one front end draws the
            same tokens as `LLM` with this seed.
    """
    if seed is None:
        return secrets.randbits(64)
    if index == 0:
        return seed & MASK64
    digest = hashlib.sha256(f"inflight seed {seed & MASK64} front end {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words in which every input bit affects
    every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_words(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The part of `draw_keys` that is the same for all positions, [n]."""
    return mix64(seeds + _GOLDEN)


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """The two keys of each draw, int32 [n, 2]. The second key is odd, because noise.py multiplies by it.

    Args:
        seeds: [n].
        positions: [n], the number of tokens before the token to be drawn.
    """
    words = mix64(seed_words(seeds) + positions.astype(np.uint64) * _GOLDEN)
    keys = words.view(np.int32).reshape(-1, 2)
    keys[:, 1] |= 1
    return keys
