"""`Recorder` and `Tape`: a computation by the C++ kernels, recorded in one step and made in one call in later steps.

A tape is to a CPU what a CUDA graph is to a GPU. While a `Recorder` is open, Python and the kernels compute as always, and the
recorder writes down every call of the library. It writes down what a pointer means: an input, a struct of the step, a result,
or working memory. So the tape holds for any number of tokens and rows. Weights and KV caches are constants of the tape.

Buffers of the working memory are placed anew: two of them share memory if the last call that uses one comes before the first
call that uses the other.

A recorder never disturbs the step that it watches. If the step does something that a tape cannot repeat (an operation of torch
besides allocations and views, a pointer of unknown meaning), the recorder remembers the reason, and there is no tape.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.device.long_calls import LONG_CALLS
from inflight.kernels.cpu.call_checks import require, require_rows
from inflight.kernels.cpu.functions import SIGNATURES, AttentionStep, TapeCall, TapePatch
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.kernels.cpu.tape_functions import TAPED, Taped

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
_VIEWS = frozenset(
    "alias chunk detach flatten reshape select slice split split_with_sizes unbind unsqueeze view".split()
)
_LINE = 64

# The `values` of a replay (tape.cpp) are 0, the two counts, the address of the working memory, then the addresses of the
# inputs, of the structs, and of the results.
_NOTHING, _TOKENS, _ROWS, _MEMORY, _FIRST_INPUT = range(5)


class _Shape(NamedTuple):
    """A tensor with one row for each token (`kind` is _TOKENS) or for each selected row (_ROWS)."""

    kind: int
    row: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _Buffer:
    """A tensor that calls use. If `base` is None, it is a part of the working memory, which begins `place` bytes for each token
    after the beginning. Otherwise `base` is the index of its address in `values`."""

    start: int
    num_bytes: int
    kind: int | None = None  # as in `_Shape`; None: it is not yet written
    base: int | None = None
    place: int = 0
    first_call: int = 0
    last_call: int = 0


class Tape:
    """Recorded calls. `Recorder.finish` makes it."""

    def __init__(
        self,
        kernels: KernelLibrary,
        calls: Sequence[TapeCall],
        patches: Sequence[TapePatch],
        inputs: Sequence[_Shape],
        results: Sequence[_Shape],
        returned: Sequence[int],
        bytes_per_token: int,
        num_steps: int,
        kept: Sequence[Any],  # Any: structs of all kinds, to which calls point
    ) -> None:
        arrays = (TapeCall * len(calls))(*calls), len(calls), (TapePatch * len(patches))(*patches)
        self._replay = partial(kernels.inflight_replay, *arrays)
        self._inputs, self._results, self._returned = inputs, results, returned
        self._bytes_per_token, self._num_steps, self._kept = bytes_per_token, num_steps, kept

    def replay(
        self,
        inputs: Sequence[Tensor],
        rows: Tensor | None,
        steps: Sequence[AttentionStep],
        run: Callable[[Callable[[], int]], None],
    ) -> list[Tensor]:
        """Computes another step, and returns what the recorded computation would return. The first arguments are those of
        `Recorder`, but there may be no tokens and no rows. `run` gets the call that computes the step. The call returns 0, or
        the error of a collective."""
        num_tokens, num_rows = len(inputs[0]), 0 if rows is None else len(rows)
        tensors, counts = [*inputs] if rows is None else [*inputs, rows], (0, num_tokens, num_rows)
        for tensor, shape in zip(tensors, self._inputs, strict=True):
            fits = tensor.shape == (counts[shape.kind], *shape.row) and tensor.dtype == shape.dtype
            require(fits and tensor.is_contiguous(), "a tape needs inputs as in its recording", tensor, shape)
        require(num_rows <= num_tokens, "a tape needs at most as many rows as tokens", num_rows, num_tokens)
        require(len(steps) == self._num_steps, "a tape needs as many KV groups as its recording", len(steps))
        if rows is not None:
            require_rows(rows, num_tokens)
        memory = torch.empty(num_tokens * self._bytes_per_token, dtype=torch.uint8, device="cpu")
        results = [
            torch.empty((counts[shape.kind], *shape.row), dtype=shape.dtype, device="cpu") for shape in self._results
        ]
        addresses = [tensor.data_ptr() for tensor in (memory, *tensors)]
        addresses += [ctypes.addressof(step) for step in steps]
        addresses += [tensor.data_ptr() for tensor in results]
        values = (ctypes.c_int64 * (len(counts) + len(addresses)))(*counts, *addresses)
        LONG_CALLS.before()
        # a range that no profiler records would still make fifteen calls
        with record_function("decoder_layers") if profiler._is_profiler_enabled else nullcontext():
            run(partial(self._replay, values))
        tensors += results
        return [tensors[index] for index in self._returned]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for this class
    """Records the calls of the thread that opens it.

    Args:
        kernels: the library that the computation calls.
        inputs: each [num_tokens, ...] and contiguous; at least one token.
        rows: int64 [num_rows], which `select_rows` selects, at least one; or None.
        steps: the structs of the step's KV groups.
        constants: weights and KV caches, which stay where they are.
    """

    def __init__(
        self,
        kernels: KernelLibrary,
        inputs: Sequence[Tensor],
        rows: Tensor | None,
        steps: Sequence[AttentionStep],
        constants: Iterable[Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None  # why there is no tape
        self._kernels = kernels
        self._counts = (0, len(inputs[0]), 0 if rows is None else len(rows))
        tensors = [*inputs] if rows is None else [*inputs, rows]
        self._inputs = [_Shape(_ROWS if x is rows else _TOKENS, tuple(x.shape[1:]), x.dtype) for x in tensors]
        self._buffers = [
            _Buffer(tensor.data_ptr(), tensor.nbytes, shape.kind, _FIRST_INPUT + index)
            for index, (tensor, shape) in enumerate(zip(tensors, self._inputs, strict=True))
        ]
        self._steps = {ctypes.addressof(step): _FIRST_INPUT + len(tensors) + i for i, step in enumerate(steps)}
        storages = [tensor.untyped_storage() for tensor in constants]
        self._constants = [range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        self._calls: list[TapeCall] = []
        self._patches: list[TapePatch] = []
        self._pointers: list[tuple[TapePatch, _Buffer]] = []
        self._kept: list[Any] = []  # Any: structs of all kinds

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._kernels.recording.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:  # Any: what every context manager gets
        self._kernels.recording.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes 2 s

    # Any: torch's types of this method
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _ALLOCATIONS and result.is_contiguous():
            self._buffers.append(_Buffer(result.data_ptr(), result.nbytes))
        elif name not in _VIEWS:
            self._refuse(f"torch computes {name}")
        elif (buffer := self._find(args[0].data_ptr())) is not None:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            along_rows = "dim" in names and given.get("dim", 0) in (0, -args[0].dim())
            views = [result] if isinstance(result, Tensor) else result
            for view in (each for each in views if each.numel()):
                has_rows = view.shape[:1] == args[0].shape[:1] and view.stride()[:1] == args[0].stride()[:1]
                if along_rows or not has_rows or self._find(view.data_ptr()) is not buffer:
                    self._refuse(f"the result of {name} is not a view of all rows")
        return result

    def add(self, name: str, arguments: Sequence[Any]) -> None:
        """The library calls this after each call of a function in this thread."""
        if name not in TAPED:
            self._refuse(f"{name} is not for tapes")
        if self.refusal is not None:
            return
        taped, call, first_patch = TAPED[name], TapeCall(function=list(TAPED).index(name)), len(self._patches)
        pointers: dict[int, tuple[_Buffer, int]] = {}  # argument -> buffer, offset
        for index, (value, kind) in enumerate(zip(arguments, SIGNATURES[name], strict=True)):
            if value is None or index == taped.rows:
                continue
            if kind is ctypes.c_float:
                call.arguments[index] = struct.unpack("<i", struct.pack("<f", value))[0]
            elif not isinstance(value, int):
                self._add_struct(call, index, value.contents if isinstance(value, ctypes._Pointer) else value)
            elif kind is not ctypes.c_void_p or any(value in constant for constant in self._constants):
                call.arguments[index] = value
            elif (buffer := self._find(value)) is not None:
                pointers[index] = buffer, value - buffer.start
            else:
                self._refuse(f"{name} uses memory that is not known")
        self._add_pointers(name, taped, arguments, pointers)
        call.num_patches = len(self._patches) - first_patch
        self._calls.append(call)

    def _add_struct(self, call: TapeCall, argument: int, pointed: Any) -> None:  # Any: a struct of any kind
        address = ctypes.addressof(pointed)
        if address in self._steps:
            self._patches.append(TapePatch(argument, self._steps[address]))
        elif isinstance(pointed, AttentionStep):
            self._refuse("the step has another KV group")
        else:
            call.arguments[argument] = address
            self._kept.append(pointed)

    def _add_pointers(
        self, name: str, taped: Taped, arguments: Sequence[Any], pointers: dict[int, tuple[_Buffer, int]]
    ) -> None:
        known = {buffer.kind for buffer, _ in pointers.values() if buffer.kind is not None}
        if len(known) != 1 and not (known and name == "inflight_select_rows"):
            return self._refuse(f"{name} computes neither tokens nor rows")
        count = max(known)  # what has selected rows as its input has rows as its result
        num_rows = self._counts[count]
        if taped.rows is not None:
            self._patches.append(TapePatch(taped.rows, _NOTHING, count, arguments[taped.rows] // num_rows))
            if arguments[taped.rows] % num_rows:
                self._refuse(f"{name} computes a part of the rows")
        for argument, (buffer, offset) in pointers.items():
            if buffer.kind is None:
                if argument != taped.out:
                    self._refuse(f"{name} reads what no call has written")
                buffer.kind, buffer.first_call = count, len(self._calls)
            buffer.last_call = len(self._calls)
            row_bytes, rest = divmod(buffer.num_bytes, self._counts[buffer.kind])
            if rest or offset >= row_bytes:
                self._refuse(f"{name} does not begin at the first row")
            self._patches.append(TapePatch(argument, offset=offset))
            self._pointers.append((self._patches[-1], buffer))
        return None

    def finish(self, results: Sequence[Tensor]) -> Tape | None:
        """Returns the tape of what was recorded, or None if `refusal` says why there is none. `results`: what the computation
        has returned."""
        shapes: list[_Shape] = []
        returned = []
        for tensor in results:
            buffer = self._find(tensor.data_ptr())
            is_whole = buffer is not None and (buffer.start, buffer.num_bytes) == (tensor.data_ptr(), tensor.nbytes)
            if buffer is None or buffer.kind is None or not is_whole or not tensor.is_contiguous():
                self._refuse("a result is not a whole tensor that the kernels have written")
                continue
            if buffer.base is None:
                buffer.base = _FIRST_INPUT + len(self._inputs) + len(self._steps) + len(shapes)
                shapes.append(_Shape(buffer.kind, tuple(tensor.shape[1:]), tensor.dtype))
            index = buffer.base - _FIRST_INPUT
            returned.append(index if index < len(self._inputs) else index - len(self._steps))
        if self.refusal is not None:
            return None
        bytes_per_token = self._place_buffers()
        for patch, buffer in self._pointers:
            if buffer.base is None:
                patch.base, patch.count, patch.per_count = _MEMORY, _TOKENS, buffer.place
            else:
                patch.base = buffer.base
        return Tape(
            self._kernels,
            self._calls,
            self._patches,
            self._inputs,
            shapes,
            returned,
            bytes_per_token,
            len(self._steps),
            self._kept,
        )

    def _place_buffers(self) -> int:
        """Divides the working memory into regions, and gives each buffer a region for as long as calls use it. Returns the
        bytes that the working memory has for each token."""
        sizes: list[int] = []  # of the regions, for each token
        free: set[int] = set()
        in_use: dict[_Buffer, int] = {}
        working = [buffer for buffer in self._buffers if buffer.base is None and buffer.kind is not None]
        for buffer in sorted(working, key=lambda buffer: buffer.first_call):
            free |= {in_use.pop(other) for other in list(in_use) if other.last_call < buffer.first_call}
            size = -(-buffer.num_bytes // self._counts[buffer.kind or 0] // _LINE) * _LINE
            if free:  # the smallest region that is large enough, else the largest one, which grows
                region = min(free, key=lambda region: (sizes[region] < size, abs(sizes[region] - size)))
                free.remove(region)
                sizes[region] = max(sizes[region], size)
            else:
                region = len(sizes)
                sizes.append(size)
            in_use[buffer] = buffer.place = region
        starts = [0, *accumulate(sizes)]
        for buffer in working:
            buffer.place = starts[buffer.place]
        return starts[-1]

    def _find(self, address: int) -> _Buffer | None:
        """Returns the newest buffer that has the address. Older ones may have been where it is now."""
        for buffer in reversed(self._buffers):
            if buffer.start <= address < buffer.start + buffer.num_bytes:
                return buffer
        return None

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason
