"""The weights of a layer's experts on a GPU, put into one tensor for each projection, for the Triton kernels."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inflight.kernels.triton.experts import ExpertWeights
from inflight.kernels.triton.weight_only import PackedIntegers


def stack_floats(weights: Sequence[Tensor]) -> ExpertWeights:
    """`weights`: [out_features, in_features] each, of one shape and dtype."""
    return ExpertWeights(
        values=torch.stack(list(weights)), out_features=weights[0].shape[0], in_features=weights[0].shape[1]
    )


def stack_fp8(weights: Sequence[Tensor], scales: Sequence[Tensor]) -> ExpertWeights:
    """`scales`: float32 [out_features, 1] each."""
    return replace(stack_floats(weights), scales=torch.stack([each.flatten() for each in scales]))


def stack_integers(weights: Sequence[PackedIntegers]) -> ExpertWeights:
    """`weights`: of one shape, number of bits and group size. Some may have offsets, and others none."""
    if any(weight.offsets is not None for weight in weights):
        weights = [_with_offsets(weight) for weight in weights]
    first = weights[0]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return ExpertWeights(
        values=torch.stack([weight.values for weight in weights]),
        out_features=first.out_features,
        in_features=first.in_features,
        scales=torch.stack([weight.scales for weight in weights]),
        offsets=torch.stack(offsets) if offsets else None,
        factors=torch.tensor([weight.factor for weight in weights], dtype=torch.float32, device=first.values.device),
        bits=first.bits,
        group_size=first.group_size,
    )


def _with_offsets(weight: PackedIntegers) -> PackedIntegers:
    """The same weight. If it has no offsets, each is its scale times 8 (4 bits) or 128 (8 bits)."""
    if weight.offsets is not None:
        return weight
    values = weight.values if weight.bits == 4 else weight.values.view(torch.uint8) ^ 128
    # the scales of a weight in float16 are at most 1, so that 128 times as much fits
    return replace(weight, values=values, offsets=weight.scales * 2 ** (weight.bits - 1))
