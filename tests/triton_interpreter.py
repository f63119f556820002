"""Triton's interpreter as the kernels need it: under numpy 2.4, which makes no int of an array of one element, what it has for
scalars; conversions to and from float8_e4m3fn that keep a NaN, as those of GPUs do; and products in which a row's place
does not matter. OpenBLAS rounds a row of float32 differently at the edge of a matrix, on some processors; a GPU does not."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

FLOAT8_NAN = 0x7F


def mend_triton_interpreter() -> None:
    """`range` over what a kernel has loaded or computed works again, a NaN stays one, and a row's product depends on its own
    numbers only. Does nothing if no test has imported the interpreter."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")  # Any: its private functions
    if interpreter is None or hasattr(interpreter, "_inflight_mended"):
        return
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(numbers: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        bits = convert(numbers, from_dtype, to_dtype, rounding_mode)
        if to_dtype.is_fp8e4nv() and from_dtype.is_fp32():
            return np.where(np.isnan(numbers.view(np.float32)), np.uint8(FLOAT8_NAN), bits)
        if from_dtype.is_fp8e4nv() and to_dtype.is_fp32():
            is_nan = numbers.view(np.uint8) & FLOAT8_NAN == FLOAT8_NAN
            return np.where(is_nan, np.float32(np.nan).view(np.uint32), bits)
        return bits

    def multiplied(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return multiply(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)  # exact but for this last rounding
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor, interpreter._convert_float = mended, converted
    builder.create_dot = multiplied
    interpreter._inflight_mended = True
