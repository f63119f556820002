"""`ExpertRouting`: which experts the routers of a layer choose, noted in one run and repeated in another.

Two experts may have nearly the same score for a token. Then a rounding decides which one is taken, and the token's result is
another one. So that results can be compared, the second run takes the experts of the first one, if its scores are the same up
to roundings. Scores that differ by more are not repeated, and the difference is seen in the result.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)


class ExpertRouting(TorchFunctionMode):
    """While it is open, calls of `topk` on scores [num_tokens, ...] are noted, or repeated.

    Attributes:
        noted: (scores, chosen experts) of each call.
    """

    def __init__(self, num_tokens: int, known: Sequence[tuple[Tensor, Tensor]] = (), tolerance: float = 0.0) -> None:
        super().__init__()
        self.noted: list[tuple[Tensor, Tensor]] = []
        self._num_tokens = num_tokens
        self._left = list(known)
        self._tolerance = tolerance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores = _rows(args[0], self._num_tokens)
        indices = _rows(result[1], self._num_tokens)
        if scores is None or indices is None:
            return result
        scores = scores.float()
        scores = scores.masked_fill(scores.isneginf(), 0)  # experts of groups that are not chosen
        self.noted.append((scores, indices))
        if not self._left:
            return result
        their_scores, their_indices = self._left.pop(0)
        if their_scores.shape != scores.shape or their_indices.shape != indices.shape:
            return result
        spread = (their_scores - their_scores.mean(-1, keepdim=True)).norm(dim=-1, keepdim=True)
        is_close = (scores - their_scores).norm(dim=-1, keepdim=True) <= self._tolerance * spread
        chosen = torch.where(is_close, their_indices, indices).view(result[1].shape)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def _rows(values: Tensor, num_tokens: int) -> Tensor | None:
    """[num_tokens, ...] or [1, num_tokens, ...] as [num_tokens, ...]; None if it has no row for each token."""
    if values.dim() > 1 and len(values) == num_tokens:
        return values
    is_batch = values.dim() > 2 and values.shape[:2] == (1, num_tokens)
    return values[0] if is_batch else None
