"""Triton's interpreter as the kernels need it: under numpy 2.4, which makes no int of an array of one element, what it has for
scalars; conversions to and from float8_e4m3fn that keep a NaN, as those of GPUs do; and products in which a row's place
does not matter. OpenBLAS rounds a row of float32 differently at the edge of a matrix, on some processors; a GPU does not. It
also runs in about a third of its time."""

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
    _hurry(interpreter)
    interpreter._inflight_mended = True


def _hurry(interpreter: Any) -> None:
    """Leave out what the interpreter does again and again without an effect on results: about two thirds of its time."""
    language = interpreter.tl.core

    # A launch replaces the functions of triton.language until it ends. Each call of a function under @triton.jit did so again.
    # Only the first one has an effect: in triton.language.core, for good, if the function uses that module.
    called: set[Any] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function not in called:
            interpreter._patch_lang(function.fn)
            called.add(function)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call

    # Sums of integers are computed a second time in int64 to find overflows, but without `debug` nothing tells of them.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    object.__setattr__(options, "sanitize_overflow", False)

    # The type of a tuple is a long text, and every tensor's shape is a tuple. It is made when somebody asks for it.
    make = language.tuple.__init__

    def started(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = language._type_for_tuple_values(self.values)
        return self._type

    language.tuple.__init__ = started
    language.tuple.type = property(type_of, lambda self, value: self.__dict__.__setitem__("_type", value))

    # A shape was checked, and written as a text, for each of the types and tensors that have it.
    make_block = language.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(language._unwrap_if_constexpr(size) for size in shape)
        if key not in shapes:
            make_block(self, element_ty, shape)
            constants = language.tuple([language.constexpr(size) for size in key])
            shapes[key] = (self.shape, self.numel, str(self.shape), constants, language.constexpr(self.numel))
        self.element_ty, (self.shape, self.numel, text, *self.of_tensor) = element_ty, shapes[key]
        self.name = f"<{text}, {element_ty}>"

    no_shape = (language.tuple([]), language.constexpr(1))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else no_shape

    language.block_type.__init__, language.tensor.__init__ = block, tensor

    # numpy's type of a Triton type was looked up in a table that was made for each look-up.
    look_up = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        if of.name not in found:
            found[of.name] = look_up(of)
        return found[of.name]

    interpreter._get_np_dtype = numpy_type
