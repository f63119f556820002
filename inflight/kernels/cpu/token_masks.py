"""`ApplyTokenMasks` by the C++ kernel: it touches only what is forbidden, a row per thread."""

from __future__ import annotations

import ctypes

from torch import Tensor

from inflight.kernels.token_masks import ApplyTokenMasks, RowIndices, TokenMasks, check_token_masks


def cpu_apply_token_masks(kernels: ctypes.CDLL) -> ApplyTokenMasks:
    def apply(logits: Tensor, rows: RowIndices, masks: TokenMasks) -> None:
        check_token_masks(logits, rows, masks)
        kernels.inflight_apply_token_masks(
            logits.data_ptr(), logits.shape[1], rows.ctypes.data, masks.ctypes.data, len(rows)
        )

    return apply
