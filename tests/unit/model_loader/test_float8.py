"""Weights in fp8: every byte, every kind of scale, and the rounding to the engine's dtype, against exact arithmetic."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from inflight.model_loader.float8 import Scales, dequantize_float8, first_nan
from tests.support.float8_checkpoints import draw_float8, nearest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte(dtype: torch.dtype) -> None:
    """The format's definition: sign, 4 bits of exponent with bias 7, 3 bits of fraction; exponent 0 has no hidden bit."""
    for byte in range(256):
        sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
        values = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        if byte & 127 == 127:
            assert first_nan(values) == (0, 0)
            continue
        assert first_nan(values) is None
        size = (fraction / 8 if exponent == 0 else 1 + fraction / 8) * 2.0 ** (max(exponent, 1) - 7)
        found = dequantize_float8(values, Scales(torch.ones(1, 1), (1, 1)), dtype)
        assert found.dtype == dtype
        assert found.item() == (-size if sign else size)


def test_the_place_of_a_nan() -> None:
    values = torch.zeros(300, 7).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[290, 5] = 0xFF
    values.view(torch.uint8)[291, 0] = 0x7F
    assert first_nan(values) == (290, 5)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_parts_that_begin_and_end_inside_of_blocks(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    rows, columns = data.draw(st.integers(1, 300), "rows"), data.draw(st.integers(1, 70), "columns")
    blocks = st.sampled_from([(128, 128), (1, columns), (rows, columns), (7, 16), (1, 16), (128, 1), (64, 500)])
    drawn = draw_float8(np.random.default_rng(seed), (rows, columns), block=data.draw(blocks, "block"))
    first_row, first_column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    part = (
        slice(first_row, data.draw(st.integers(first_row + 1, rows))),
        slice(first_column, data.draw(st.integers(first_column + 1, columns))),
    )
    scales = Scales(drawn.scales, drawn.block)
    found = dequantize_float8(drawn.values[part], scales, dtype, first_row=first_row, first_column=first_column)
    assert torch.equal(found, drawn.weight(dtype)[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    """Scales whose products float32 would bring into the middle between two numbers, and then to the wrong one of them."""
    random = np.random.default_rng(1)
    values = torch.arange(0x38, 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]  # 1 to 1.875
    scales = torch.from_numpy(random.uniform(1, 2, 400_000).astype(np.float32))[:, None]
    twice = (values.float() * scales).to(dtype)
    exact = values.double() * scales.double()
    # rounding twice is wrong where float32 loses something and its result is exactly in the middle
    bits = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    rest = (values.float() * scales).view(torch.int32) & (2**bits - 1)
    doubtful = ((rest == 2 ** (bits - 1)) & (exact.float().double() != exact)).nonzero()
    assert len(doubtful) > 10
    wrong = 0
    for row, column in doubtful[:60].tolist():
        found = dequantize_float8(values, Scales(scales[row : row + 1], (1, 8)), dtype)[0]
        truth = nearest(float(exact[row, column]), dtype)
        assert float(found[column]) == truth
        wrong += truth != float(twice[row, column])
    assert wrong > 5


@pytest.mark.parametrize("block", [(128, 128), (64, 32), None])
def test_the_formula_of_transformers(block: tuple[int, int] | None) -> None:
    drawn = draw_float8(np.random.default_rng(2), (300, 200), block=block or (300, 200))
    truth = _dequantize_fp8_weight(drawn.values, drawn.scales, list(block) if block else None, torch.float32)
    assert torch.equal(dequantize_float8(drawn.values, Scales(drawn.scales, drawn.block), torch.float32), truth)
