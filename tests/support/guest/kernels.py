"""`GuestLibrary`: the C++ kernels for ARM, cross-compiled, and called under QEMU's emulation of a processor.

A test calls such a library as it calls any other: with pointers to tensors and structs of this process. The emulated program
(driver.cpp) gets copies of the pages that a call touches, and what the call has changed in them is copied back. So the tests of
the kernels need not know where the kernels run: `python -m tests.support.guest neon FILES` runs them in this way.

What an emulator cannot show: how fast the kernels are, and mistakes in the order of memory accesses of several threads, because
the threads of the emulated program keep the stricter order of x86-64.

Calls run in one thread. With eight, about one of four cases of `test_a_row_is_the_same_bit_for_bit_in_any_company` found other
bits now and then. The cause was probably that driver.cpp mapped pages in two steps. It maps them in one now, but too few runs
have shown that this was all. With INFLIGHT_TEST_GUEST_THREADS=1 a call has the threads that its test asks for.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from inflight.kernels.cpu import library
from inflight.kernels.cpu.compile_flags import COMMON_FLAGS, INSTRUCTION_SET_FLAGS, source_digest, source_files
from inflight.kernels.cpu.functions import RESULTS, SIGNATURES
from inflight.kernels.cpu.recording import Recording, recordable

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROCESSORS = {  # QEMU's name of a processor with the instruction set: the first two have no larger one
    "neon": "cortex-a53",
    "neon_dotprod": "cortex-a76",
    "neon_bf16": "max",
}
# The program's address: far from those that this process has, where the program would otherwise be
_LINK_FLAGS = ["-static", "-fopenmp", "-Wl,-Ttext-segment=0x300000000000"]
_DRIVER = Path(__file__).with_name("driver.cpp")
_PROBE = """
#include <arm_neon.h>
#include <omp.h>
int main() {
    float32x4_t sums = vdupq_n_f32(omp_get_max_threads());
#if defined(__ARM_FEATURE_DOTPROD)
    sums = vaddq_f32(sums, vcvtq_f32_s32(vdotq_s32(vdupq_n_s32(1), vdupq_n_s8(1), vdupq_n_s8(1))));
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    sums = vbfdotq_f32(sums, vreinterpretq_bf16_f32(sums), vreinterpretq_bf16_f32(sums));
    sums = vaddq_f32(sums, vcvtq_f32_s32(vusdotq_s32(vdupq_n_s32(1), vdupq_n_u8(1), vdupq_n_s8(1))));
#endif
    return vgetq_lane_f32(sums, 0) > 0 ? 0 : 1;
}
"""
_READ, _DONE = range(2)
_MOST_ARGUMENTS = 16
_REQUEST, _MESSAGE = struct.Struct(f"<{3 + _MOST_ARGUMENTS}qfi"), struct.Struct("<3q")
_PAGE = mmap.PAGESIZE
_PAGES_OF_POINTER = 16  # so many pages behind a pointer are given to a call
_MOST_BYTES = 1 << 30  # of the pages of a call
_IOV_MAX = 1024
_STARTS = (
    8  # an address that this process uses may be taken in the emulated one: its addresses are other ones in each start
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_HAS_THREADS = os.environ.get("INFLIGHT_TEST_GUEST_THREADS") == "1"


@functools.cache
def why_not(name: str) -> str:
    """Why the kernels of this instruction set cannot be built or run here. Empty if they can.

    A program of a few lines is compiled, linked and run as the kernels are.
    """
    missing = " and ".join(f"no {program}" for program in (COMPILER, EMULATOR) if shutil.which(program) is None)
    if missing:
        return f"{missing} here"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "probe")
        source = program.with_suffix(".cpp")
        source.write_text(_PROBE)
        for command in (
            [COMPILER, *INSTRUCTION_SET_FLAGS[name], *_LINK_FLAGS, str(source), "-o", str(program)],
            [EMULATOR, "-cpu", PROCESSORS[name], str(program)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"{command[0]} here cannot serve {name}: it ended with {done.returncode}: {done.stderr[-500:]}"
    page = ctypes.create_string_buffer(1)
    copies = Copies(mmap.mmap(-1, _PAGE))
    copies.add(ctypes.addressof(page) // _PAGE * _PAGE, _PAGE)
    return "" if copies.pieces else f"process_vm_readv is refused here: {os.strerror(ctypes.get_errno())}"


class GuestError(Exception):
    """The emulated program has ended."""


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def build(name: str, folder: Path, level: str = "-O3") -> Path:
    """Compiles the kernels for an instruction set, and the driver, to one program. Returns its path.

    Args:
        level: how much the compiler optimizes. The results are the same; `-O1` takes half the time.
    """
    sources = library._FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "functions.inc").write_text("".join(f"FUNCTION({function})\n" for function in SIGNATURES))
    flags = [*COMMON_FLAGS, *INSTRUCTION_SET_FLAGS[name], f"-DINFLIGHT_SOURCE_HASH={source_digest(sources)}"]
    units = sorted(
        (path for path in source_files(sources) if path.suffix == ".cpp"), key=lambda path: -path.stat().st_size
    )
    units.append(_DRIVER)
    objects = [folder / f"{path.stem}.o" for path in units]

    def compile_unit(source: Path, made: Path) -> None:
        subprocess.run([COMPILER, *flags, level, f"-I{folder}", "-c", source, "-o", made], check=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_unit, units, objects))
    program = folder / f"kernels-{name}"
    subprocess.run([COMPILER, *_LINK_FLAGS, *objects, "-o", program], check=True)
    return program


class GuestLibrary:
    """As `KernelLibrary`. It computes one call at a time, so the collectives of several ranks cannot be called."""

    def __init__(self, program: Path, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        self.recording = Recording()
        self._command = [EMULATOR, "-cpu", PROCESSORS[instruction_set], str(program)]
        self._lock = threading.Lock()
        self._file = os.memfd_create("pages", 0)
        os.ftruncate(self._file, _MOST_BYTES)
        self._memory = mmap.mmap(self._file, _MOST_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._functions = {name: functools.partial(self._call, index, name) for index, name in enumerate(SIGNATURES)}
        for name, function in self._functions.items():
            setattr(self, name, recordable(self.recording, name, function))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def close(self) -> None:
        """Ends the emulated program. The next call starts it again."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _call(self, index: int, name: str, *arguments: Any) -> Any:
        types = SIGNATURES[name]
        assert len(arguments) == len(types), f"{name} has {len(types)} arguments, not {len(arguments)}"
        given = list(zip(arguments, types, strict=True))
        integers = [_as_integer(value, kind) for value, kind in given if kind is not ctypes.c_float]
        numbers = [value for value, kind in given if kind is ctypes.c_float] or [0.0]
        pages = set[int]().union(*(_pages_of(value, kind) for value, kind in given if _is_pointer(kind)))
        with self._lock:
            for start in range(_STARTS):
                try:
                    result = self._compute(index, integers, numbers[0], pages)
                    break
                except GuestError as error:
                    self.close()
                    if "uses the same address" not in str(error) or start == _STARTS - 1:
                        raise
        kind = RESULTS.get(name)
        return None if kind is None else kind(result).value

    def _compute(self, index: int, integers: list[int], number: float, pages: set[int]) -> int:
        """One call. What it has written is stored only when it is done, so a call may be repeated.

        `pages`: numbers of pages that it will probably touch. Those that cannot be read are not given to it.
        """
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                [*self._command, str(self._file)], stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[self._file]
            )
        copies = Copies(self._memory)
        for first, count in _runs(sorted(pages)):
            copies.add(first * _PAGE, count * _PAGE)
        padded = integers + [0] * (_MOST_ARGUMENTS - len(integers))
        num_threads = torch.get_num_threads() if _HAS_THREADS else 1
        request = _REQUEST.pack(index, num_threads, len(copies.pieces), *padded, number, 0)
        self._write(request + b"".join(_MESSAGE.pack(*piece) for piece in copies.pieces))
        while True:
            kind, value, size = _MESSAGE.unpack(self._read(_MESSAGE.size))
            if kind == _DONE:
                copies.store()
                return int(value)
            known = len(copies.pieces)
            copies.add(value, size)
            is_first = len(copies.pieces) > known and copies.pieces[known][0] == value
            self._write(_MESSAGE.pack(*(copies.pieces[known] if is_first else (value, 0, 0))))
            copies.keep(known + is_first)

    def _write(self, content: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _read(self, size: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        content = self._process.stdout.read(size)
        if len(content) < size:
            self._fail()
        return content

    def _fail(self) -> NoReturn:
        assert self._process is not None and self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        raise GuestError(f"the emulated program has ended with {self._process.wait()}: {said}")


class Copies:
    """Copies of pages of this process, in memory that the emulated program has mapped, too."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._used = np.frombuffer(memory, np.uint8), 0
        self._before = list[NDArray[np.uint8]]()
        self.pieces = list[tuple[int, int, int]]()  # address, size, and place in the memory

    def add(self, address: int, size: int) -> None:
        """Copies the pages that can be read. Those beside a page that cannot are a piece of their own."""
        end = address + size
        while address < end:
            size = min(end - address, _IOV_MAX * _PAGE)
            assert self._used + size <= _MOST_BYTES, "too much memory"
            pages = [_Extent(address + at, _PAGE) for at in range(0, size, _PAGE)]
            here = _Extent(self._memory.ctypes.data + self._used, size)
            array = (_Extent * len(pages))(*pages)
            count = _LIBC.process_vm_readv(os.getpid(), ctypes.byref(here), 1, array, len(pages), 0)
            if count > 0:
                self.pieces.append((address, count, self._used))
                self._before.append(self._memory[self._used : self._used + count].copy())
                self._used += count
            address += max(count, 0) + (_PAGE if count < size else 0)

    def keep(self, count: int) -> None:
        """Forgets all pieces but the first `count`."""
        del self.pieces[count:], self._before[count:]

    def store(self) -> None:
        """Writes what has changed to the pages themselves."""
        for (address, size, place), before in zip(self.pieces, self._before, strict=True):
            now = self._memory[place : place + size]
            for first, count in _runs(np.flatnonzero(now != before).tolist()):
                ctypes.memmove(address + first, now[first : first + count].tobytes(), count)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first number, and how many follow each other, in a sorted list."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], at - first
            first = at


def _is_pointer(kind: Any) -> bool:
    return kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)  # not an array


def _pages_of(value: Any, kind: Any) -> set[int]:
    """The pages behind a pointer, and behind the pointers in the struct that it points to."""
    pointers = [_as_integer(value, kind)]
    if isinstance(value, ctypes.Structure):
        fields = [(field[0], field[1]) for field in value._fields_]
        pointers += [_as_integer(getattr(value, name), of_field) for name, of_field in fields if _is_pointer(of_field)]
    return {page for at in pointers if at for page in range(at // _PAGE, at // _PAGE + _PAGES_OF_POINTER)}


def _as_integer(value: Any, kind: Any) -> int:
    """What ctypes would give to a C function: for a pointer its address."""
    if not _is_pointer(kind):
        return int(value)
    if kind is not ctypes.c_void_p and isinstance(value, kind._type_):
        return ctypes.addressof(value)
    return ctypes.cast(value, ctypes.c_void_p).value or 0


def install(name: str, program: Path) -> None:
    """Lets `open_kernels` find an ARM processor with this instruction set here, instead of the real one."""
    opened = functools.cache(GuestLibrary)
    given: dict[str, Any] = {
        "_processor_flags": lambda: library.INSTRUCTION_SETS[name],
        "_path": lambda wanted: program if wanted == name else program.with_name("not built"),
        "_check_sources": lambda *_: None,
        "_share_openmp_runtime": lambda: None,
        "KernelLibrary": opened,
    }
    vars(library).update(given)
