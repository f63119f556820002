"""`StoredParts`: what is kept as the checkpoint has it, and how the parts become one weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight, quantize_rows
from inflight.layers.linear_method import PlainLinear
from inflight.layers.stored_parts import StoredParts


class Copying(PlainLinear):
    copies_weights = True


def stored() -> StoredParts:
    return StoredParts(Copying(torch.float32), torch.float32)


def whole(assembled: Sequence[Tensor] | QuantizedWeight) -> Tensor:
    assert isinstance(assembled, list) and len(assembled) == 1
    found: Tensor = assembled[0]
    return found


def test_floats_are_kept_only_if_they_are_copied_later_as_they_are() -> None:
    weight = torch.randn(4, 8)
    assert stored().accept(weight)
    assert stored().accept(torch.randn(8, 8)[::2])  # rows may have gaps between them
    assert not stored().accept(weight.bfloat16())
    assert not stored().accept(torch.randn(8, 4).T)
    assert not StoredParts(PlainLinear(torch.float32), torch.float32).accept(weight)
    assert StoredParts(PlainLinear(torch.float32), torch.float32).accept(quantize_rows(weight, bits=8, group_size=0))


def test_floats_are_put_together_in_the_order_of_their_rows() -> None:
    parts, first, second = stored(), torch.randn(3, 8), torch.randn(2, 8)
    assert parts.accept(second, first_row=3) and parts.accept(first)
    found = parts.assemble(torch.zeros(5, 8))
    assert isinstance(found, list) and found[0] is first and found[1] is second and parts.num_quantized == 0


def test_parts_that_were_not_accepted_are_in_the_weight_already() -> None:
    parts, weight, second = stored(), torch.ones(5, 8), torch.randn(2, 8)
    assert parts.accept(second, first_row=3)
    found = whole(parts.assemble(weight))
    assert found is weight and found[:3].eq(1).all() and found[3:].equal(second)
    assert whole(stored().assemble(weight)) is weight


def test_quantized_parts_stay_quantized_unless_they_are_beside_floats() -> None:
    first, second = (quantize_rows(torch.randn(rows, 64), bits=8, group_size=0) for rows in (3, 2))
    parts = stored()
    assert parts.accept(second, first_row=3) and parts.accept(first)
    assert parts.num_quantized == 2
    found = parts.assemble(torch.zeros(5, 64))
    assert isinstance(found, QuantizedWeight)
    assert found.dequantize().equal(torch.cat([first.dequantize(), second.dequantize()]))
    floats: Tensor = torch.randn(2, 64)
    assert parts.accept(floats, first_row=3) and parts.num_quantized == 1
    weight = whole(parts.assemble(torch.zeros(5, 64)))
    assert weight.equal(torch.cat([first.dequantize(), floats]))
