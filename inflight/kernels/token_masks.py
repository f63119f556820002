"""`ApplyTokenMasks`: the logits of forbidden tokens become -inf, by the C++ kernel or in plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.kernels.cpu.library import load_kernels

WORD_BITS = 32
CHUNK_ELEMENTS = 512 * 1024  # temporaries stay in the caches: half the time

TokenMasks = npt.NDArray[np.int32]
RowIndices = npt.NDArray[np.int64]

# (logits, rows, masks), in place, any thread:
#     logits  float32 [num_rows, vocab_size], contiguous
#     rows    int64 [n], of the logits, distinct
#     masks   int32 [n, ceil(vocab_size / 32)], contiguous: bit t % 32 of word t // 32 says that token t may be drawn; bits
#             beyond the vocabulary are ignored
ApplyTokenMasks = Callable[[Tensor, RowIndices, TokenMasks], None]


def check_token_masks(logits: Tensor, rows: RowIndices, masks: TokenMasks) -> None:
    """Asserts the shapes and types of `ApplyTokenMasks`."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert rows.dtype == np.int64 and rows.flags.c_contiguous and rows.ndim == 1
    assert masks.dtype == np.int32 and masks.flags.c_contiguous
    assert masks.shape == (len(rows), -(-vocab_size // WORD_BITS)), f"masks {masks.shape}, rows {rows.shape}"
    assert not len(rows) or (rows.min() >= 0 and rows.max() < num_rows), f"a row of {rows} is outside [0, {num_rows})"


def torch_apply_token_masks(logits: Tensor, rows: RowIndices, masks: TokenMasks) -> None:
    """For every device."""
    check_token_masks(logits, rows, masks)
    vocab_size = logits.shape[1]
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), step):
        chunk = masks[start : start + step]
        allowed = np.unpackbits(chunk.astype("<i4").view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        at = torch.from_numpy(rows[start : start + step]).to(logits.device)
        logits[at] = logits[at].masked_fill_(forbidden, -torch.inf)


def cpu_apply_token_masks(kernels: ctypes.CDLL) -> ApplyTokenMasks:
    """By the C++ kernel: it writes forbidden logits only, a row per thread."""

    def apply(logits: Tensor, rows: RowIndices, masks: TokenMasks) -> None:
        check_token_masks(logits, rows, masks)
        kernels.inflight_apply_token_masks(
            logits.data_ptr(), logits.shape[1], rows.ctypes.data, masks.ctypes.data, len(rows)
        )

    return apply


def select_apply_token_masks(device: torch.device) -> ApplyTokenMasks:
    """The C++ kernel where it can be used, plain torch everywhere else."""
    kernels = load_kernels() if device.type == "cpu" else None
    return torch_apply_token_masks if kernels is None else cpu_apply_token_masks(kernels)
