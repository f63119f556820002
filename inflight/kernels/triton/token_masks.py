"""`apply_token_masks` in Triton: writes only the logits of forbidden tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.kernels.token_masks import WORD_BITS

_WORDS = 64  # mask words per program, for 2048 tokens


def triton_apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `apply_token_masks`. Does not wait for the device. If a row occurs twice, both masks apply."""
    vocab_size, num_words = logits.shape[1], masks.shape[1]
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert masks.dtype == torch.int32 and masks.is_contiguous() and rows.is_contiguous()
    assert masks.shape == (len(rows), -(-vocab_size // WORD_BITS)), (
        f"masks {tuple(masks.shape)}, rows {tuple(rows.shape)}"
    )
    if len(rows):
        grid = (len(rows), triton.cdiv(num_words, _WORDS))
        token_masks_kernel[grid](logits, rows, masks, vocab_size, num_words, WORDS=_WORDS, num_warps=4)


@triton.jit(do_not_specialize=["rows", "masks"])  # both are parts of one copied buffer
def token_masks_kernel(logits, rows, masks, vocab_size, num_words, WORDS: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.arange(0, 32)
    mask = tl.load(masks + entry * num_words + words, mask=words < num_words, other=-1)
    forbidden = ((mask[:, None] >> bits[None, :]) & 1) == 0
    tokens = words[:, None] * 32 + bits[None, :]
    nothing = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(logits + row * vocab_size + tokens, nothing, mask=forbidden & (tokens < vocab_size))
