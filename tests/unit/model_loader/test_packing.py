"""Integers, scales and zero points become one weight, in groups if a kernel takes them; and the columns of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.packing import make_weight, shard_columns, unpack_nibbles, unpack_words

INDEX = torch.arange(64)


def drawn(num_columns: int, num_groups: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, zero points) of three rows."""
    generator = torch.Generator().manual_seed(num_columns)
    values = torch.randint(0, 2**bits, (3, num_columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(3, num_groups, generator=generator) + 0.5
    zero_points = torch.randint(0, 2**bits, (3, num_groups), generator=generator).float()
    return values, scales, zero_points


def floats(weight: QuantizedWeight | Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def test_words_and_bytes_have_the_low_bits_first() -> None:
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert unpack_words(words, 4).tolist() == [[*range(8), *[15] * 8]]
    assert unpack_words(words, 8).tolist() == [[0x10, 0x32, 0x54, 0x76, *[255] * 4]]
    assert unpack_nibbles(torch.tensor([[0x21], [0x43]], dtype=torch.uint8)).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("num_columns", "num_groups", "bits", "index", "expected"),
    [
        (64, 2, 4, None, (4, 32, False)),
        (64, 2, 4, INDEX // 32, (4, 32, False)),
        (64, 2, 4, INDEX % 2, None),  # the columns of a group are not neighbours
        (64, 2, 4, (INDEX >= 30).long(), None),
        (60, 7, 4, INDEX[:60] // 9, None),  # the last group is shorter
        (64, 4, 4, None, None),  # groups of 16
        (64, 4, 8, None, (8, 16, False)),
        (64, 8, 8, None, None),
        (256, 1, 4, None, (4, 128, False)),  # one scale for each row: groups that kernels take
        (192, 1, 4, None, (4, 64, False)),
        (96, 1, 4, None, (4, 32, False)),
        (48, 1, 8, None, (8, 48, False)),
        (48, 1, 4, None, None),
    ],
)
def test_the_form_of_a_weight(
    num_columns: int, num_groups: int, bits: int, index: Tensor | None, expected: tuple[int, int, bool] | None
) -> None:
    values, scales, zero_points = drawn(num_columns, num_groups, bits)
    weight = make_weight(values, scales, zero_points, bits, index)
    assert (weight.format if isinstance(weight, QuantizedWeight) else None) == expected
    group = torch.arange(num_columns) // (num_columns // num_groups) if index is None else index
    truth = scales[:, group] * (values.float() - zero_points[:, group])
    torch.testing.assert_close(floats(weight), truth, rtol=1e-4, atol=1e-3)


def test_zero_points_in_the_middle_of_bytes_need_no_offsets() -> None:
    values, scales, zero_points = drawn(40, 1, 8)
    zero_points.fill_(128)
    weight = make_weight(values, scales, zero_points, 8)
    assert isinstance(weight, QuantizedWeight) and weight.format == (8, 40, True)
    torch.testing.assert_close(weight.dequantize(), scales * (values.float() - 128))
    zero_points[1] = 127
    assert isinstance(make_weight(values, scales, zero_points, 8), Tensor)
    four = make_weight(*drawn(64, 1, 4)[:2], torch.full((3, 1), 8.0), 4)
    assert isinstance(four, QuantizedWeight) and four.offsets is not None


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_group_that_there_is_not(wrong: int) -> None:
    index = INDEX // 32
    index[5] = wrong
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        make_weight(*drawn(64, 2, 4), 4, index)


def test_the_columns_of_a_rank() -> None:
    plain = torch.randn(3, 8)
    assert torch.equal(floats(shard_columns(plain, slice(2, 5), "x")), plain[:, 2:5])
    assert shard_columns(plain, slice(0, 8), "x") is plain
    in_groups = make_weight(*drawn(128, 2, 4), 4)
    for columns, group_size in ((slice(64, 128), 64), (slice(32, 96), 32), (slice(0, 32), 32)):
        shard = shard_columns(in_groups, columns, "x")
        assert isinstance(shard, QuantizedWeight) and shard.group_size == group_size
        assert torch.equal(shard.dequantize(), floats(in_groups)[:, columns])
    assert isinstance(in_groups, QuantizedWeight)
    looked_up = replace(in_groups, offsets=None, table=tuple(range(-100, 60, 10)))
    for columns, group_size in ((slice(64, 128), 64), (slice(32, 96), 32)):
        shard = shard_columns(looked_up, columns, "x")
        assert isinstance(shard, QuantizedWeight) and shard.group_size == group_size
        assert torch.equal(shard.dequantize(), looked_up.dequantize()[:, columns])
    symmetric = make_weight(*drawn(40, 1, 8)[:2], torch.full((3, 1), 128.0), 8)
    shard = shard_columns(symmetric, slice(10, 25), "x")
    assert isinstance(shard, QuantizedWeight) and shard.offsets is None and shard.values.is_contiguous()
    assert torch.equal(shard.dequantize(), floats(symmetric)[:, 10:25])


@pytest.mark.parametrize(
    ("num_columns", "num_groups", "bits", "part", "message"),
    [
        (128, 2, 4, 16, "128 columns in groups of 64, .* part of 16 is no multiple of 32: use .* of 1 or 2 or 4, or"),
        (96, 1, 4, 48, "96 columns in groups of 32, .* part of 48 is no multiple of 32: use .* of 1 or 3, or"),
        (64, 2, 8, 8, "64 columns in groups of 32, .* part of 8 is no multiple of 16: use .* of 1 or 2 or 4, or"),
    ],
)
def test_columns_that_no_kernel_takes(num_columns: int, num_groups: int, bits: int, part: int, message: str) -> None:
    weight = make_weight(*drawn(num_columns, num_groups, bits), bits)
    with pytest.raises(CheckpointError, match=f"^name has {message} the plain checkpoint"):
        shard_columns(weight, slice(0, part), "name")
    assert isinstance(shard_columns(weight, slice(0, 32), "name"), QuantizedWeight)


def test_a_rank_that_cuts_a_group_with_a_table_gets_8_bits() -> None:
    values, scales, _ = drawn(96, 3, 4)
    weight = QuantizedWeight(values=values, scales=scales, offsets=None, bits=4, table=tuple(range(-100, 60, 10)))
    part = shard_columns(weight, slice(48, 96), "w")
    assert isinstance(part, QuantizedWeight) and part.format == (8, 16, False)
    torch.testing.assert_close(part.dequantize(), weight.dequantize()[:, 48:], rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match="use a tensor_parallel_size of"):
        shard_columns(weight, slice(8, 96), "w")
