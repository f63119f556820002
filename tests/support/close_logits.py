"""The rule by which logits in float32 equal those of transformers."""

from __future__ import annotations

from torch import Tensor

# The largest difference over the largest logit. Single logits have no tolerance of their own: near 0 they are differences of
# large numbers, and how they are rounded depends on the processor.
FLOAT32_TOLERANCE = 1e-4


def relative_difference(found: Tensor, truth: Tensor) -> float:
    """The largest difference between two tensors of the same shape, divided by the largest finite value of `truth`. Values of
    infinity are equal to themselves, and different from all others. NaN is different from everything."""
    differences = (found - truth).abs().masked_fill(found == truth, 0.0)
    return float(differences.max() / truth[truth.isfinite()].abs().max())
