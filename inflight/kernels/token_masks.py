"""`apply_token_masks`: sets the logits of forbidden tokens to -inf, with the kernel of the device or in plain torch."""

import ctypes

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require, require_rows
from inflight.kernels.cpu.library import load_kernels

WORD_BITS = 32
CHUNK_ELEMENTS = 512 * 1024  # logits handled at once; they fit into the processor's caches, which halves the time


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Sets logits in place. Any thread may call it. The arguments are on one device.

    Args:
        logits: float32 [num_rows, vocab_size], contiguous.
        rows: int64 [n], indices of rows of `logits`, distinct.
        masks: int32 [n, ceil(vocab_size / 32)], contiguous: bit t % 32 of word t // 32 is 1 if token t may be drawn; bits
            beyond the vocabulary are ignored.
    """
    if logits.device.type == "cuda":
        from inflight.kernels.triton.token_masks import triton_apply_token_masks

        triton_apply_token_masks(logits, rows, masks)
    elif logits.device.type == "cpu" and (kernels := load_kernels()) is not None:
        cpu_apply_token_masks(kernels, logits, rows, masks)
    else:
        torch_apply_token_masks(logits, rows, masks)


def run_token_masks_once(vocab_size: int, device: torch.device) -> None:
    """Makes the device's kernel ready: on a GPU, its first call compiles it."""
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    apply_token_masks(logits, row, torch.zeros(1, -(-vocab_size // WORD_BITS), dtype=torch.int32, device=device))


def check_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Requires that the arguments have the shapes and dtypes of `apply_token_masks`."""
    num_rows, vocab_size = logits.shape
    fits = logits.dtype == torch.float32 and rows.dtype == torch.int64 and masks.dtype == torch.int32
    fits = fits and rows.ndim == 1 and masks.shape == (len(rows), -(-vocab_size // WORD_BITS))
    fits = fits and all(tensor.is_contiguous() for tensor in (logits, rows, masks))
    require(
        fits, "token masks need logits in float32, rows in int64 and masks in int32, contiguous", logits, rows, masks
    )
    require_rows(rows, num_rows)


def torch_apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    if logits.device.type == "cpu":  # on other devices torch itself refuses what does not fit
        check_token_masks(logits, rows, masks)
    vocab_size = logits.shape[1]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), step):
        at, words = rows[start : start + step], masks[start : start + step]
        allowed = (words[:, :, None] >> bits) & 1
        forbidden = (allowed == 0).flatten(1)[:, :vocab_size]
        logits[at] = logits[at].masked_fill_(forbidden, -torch.inf)


def cpu_apply_token_masks(kernels: ctypes.CDLL, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """The C++ kernel writes only forbidden logits. Each thread handles whole rows."""
    check_token_masks(logits, rows, masks)
    kernels.inflight_apply_token_masks(logits.data_ptr(), logits.shape[1], rows.data_ptr(), masks.data_ptr(), len(rows))
