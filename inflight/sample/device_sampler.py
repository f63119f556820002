"""`DeviceSampler`: draws one token per row on a GPU, by kernels that a CUDA graph can record.

The sampler owns the scratch memory of the kernels (kernels/triton/sampling.py), so all draws must be on one stream. When a
request gets its slot (its place in the batch), the host writes a column of parameters. The device computes everything else,
including the keys of the draws (two numbers per draw that select its noise, see seeds.py).
"""

import numpy as np
import torch
from torch import Tensor

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.kernels.triton import sampling as kernels
from inflight.sample.rows import RANDOM, RESTRICTED
from inflight.sample.seeds import seed_words
from inflight.sample.state import features_of, parameters_of

BLOCK_SIZE = 2048  # tokens (8 KB of logits) per Triton program: 75 programs for a vocabulary of 152,000
GROUP_SIZE = 64  # tokens per group; the kernels keep each group's largest logit. 152,000 tokens make 2,400 groups
SEARCH_BLOCK_SIZE = 2048  # how many groups' maxima, or tokens of listed groups, a program reads at a time


class DeviceSampler:
    """Draws the same tokens as `Sampler` from the same logits. There is one exception: a rounding error in a sum or a logarithm
    can change which of two scores is larger, or whether a token is within top_p.

    Args:
        max_num_draws: the most rows of a `draw`.
        block_size, group_size, search_block_size: powers of two; see `kernels.choose_tokens`.
    """

    NUM_COLUMNS = kernels.NUM_COLUMNS

    def __init__(
        self,
        vocab_size: int,
        max_num_draws: int,
        device: torch.device,
        *,
        block_size: int = BLOCK_SIZE,
        group_size: int = GROUP_SIZE,
        search_block_size: int = SEARCH_BLOCK_SIZE,
    ) -> None:
        num_blocks = -(-vocab_size // block_size)
        num_groups = num_blocks * (block_size // group_size)
        self._vocab_size = vocab_size
        self._max_num_draws = max_num_draws
        self._sizes = block_size, group_size, search_block_size
        self._scratch = (
            torch.empty(max_num_draws, num_blocks, dtype=torch.int64, device=device),
            torch.empty(max_num_draws, num_blocks, dtype=torch.float32, device=device),
            torch.empty(max_num_draws, num_groups, dtype=torch.int32, device=device),
            torch.empty(max_num_draws, num_groups, dtype=torch.int32, device=device),
        )

    @staticmethod
    def parameters(sampling: ResolvedSampling, vocab_size: int) -> Int32Array:
        """A slot's column of parameters: int32 [NUM_COLUMNS]. A greedy request has zeros."""
        words = np.zeros(kernels.NUM_COLUMNS, dtype=np.int32)
        features = features_of(sampling, vocab_size)
        if not features & (RANDOM | RESTRICTED):
            return words
        row = parameters_of(sampling, vocab_size)
        restricted = bool(features & RESTRICTED)
        words[kernels.MODE.value] = (kernels.RESTRICTED if restricted else kernels.RANDOM).value
        for column, value in (
            (kernels.TEMPERATURE, row["temperature"]),
            (kernels.SEED, seed_words(row["seed"])),
            (kernels.TOP_K, row["top_k"].astype(np.int32)),
            (kernels.TOP_P, row["top_p"]),
            (kernels.LOG_MIN_P, row["log_min_p"]),
        ):
            bits = np.ascontiguousarray(value).view(np.int32)
            words[column.value : column.value + len(bits)] = bits
        return words

    def draw(self, logits: Tensor, columns: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Draw a token for each row. A CUDA graph can record this call, for a fixed number of rows.

        Args:
            logits: float32 [n, vocab_size], contiguous; not modified.
            columns: int32 [NUM_COLUMNS, num_slots], the `parameters` of each slot; its last dimension is contiguous.
            slots: int32 [n], the column that each row uses; a slot may occur several times.
            positions: int32 [n], the position of the token to be drawn: the number of tokens before it.
            tokens: int32 [n], overwritten; IMPOSSIBLE_TOKEN (-1) for rows in which all logits are -inf, or one is NaN.
        """
        num_rows = len(logits)
        assert logits.shape == (num_rows, self._vocab_size) and num_rows <= self._max_num_draws, tuple(logits.shape)
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        assert columns.shape[0] == kernels.NUM_COLUMNS and columns.stride(1) == 1
        assert len(slots) == len(positions) == len(tokens) == num_rows
        assert columns.dtype == slots.dtype == positions.dtype == tokens.dtype == torch.int32
        if num_rows:
            kernels.choose_tokens(logits, columns, slots, positions, tokens, self._scratch, *self._sizes)
