"""`ApplyTokenMasks` by the C++ kernel: it touches only what is forbidden, a row per thread."""

from __future__ import annotations

import ctypes

from torch import Tensor

from inflight.kernels.token_masks import ApplyTokenMasks, check_token_masks


def cpu_apply_token_masks(kernels: ctypes.CDLL) -> ApplyTokenMasks:
    def apply(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        check_token_masks(logits, rows, masks)
        kernels.inflight_apply_token_masks(
            logits.data_ptr(), logits.shape[1], rows.data_ptr(), masks.data_ptr(), len(rows)
        )

    return apply
