"""Loads the library of C++ kernels for the processor's best instruction set, and binds the kernels' threads to cores.

There is one library per instruction set. `pip install` builds the libraries (setup.py). They use neither Python nor torch:
their functions have pointers as arguments and are called through ctypes, which releases the interpreter lock. The kernels run
in the OpenMP pool of torch, because two pools on the same cores would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from inflight import envs
from inflight.errors import ConfigError
from inflight.kernels.cpu.compile_flags import source_digest, source_files

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_AVX2 = frozenset("avx avx2 bmi1 bmi2 f16c fma movbe".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni".split())
# Instruction set -> the processor flags that it needs, as /proc/cpuinfo spells them. The best set comes first.
INSTRUCTION_SETS = {"avx512_bf16": _AVX512 | {"avx512_bf16"}, "avx512": _AVX512, "avx2": _AVX2}

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # `DType` of kernels.h


class AttentionStep(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the arrays behind its pointers alive."""

    _fields_ = (
        ("num_rows", c_int32),
        ("block_size", c_int32),
        ("sliding_window", c_int32),
        ("table_stride", c_int32),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("block_table", c_void_p),
        ("state_bytes", c_int64),
        ("num_states", c_int32),
    )


class HeadLayout(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("block_stride", c_int64),
    )


class AttentionParams(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointer alive."""

    _fields_ = (("scale", c_float), ("soft_cap", c_float), ("sinks", c_void_p))


class LinearWeight(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("group_size", c_int64),
        ("scale", c_float),
        ("bits", c_int32),
        ("has_offsets", c_int32),
        ("gate", c_int32),
    )


class GatedDelta(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("num_key_heads", c_int64),
        ("num_value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("kernel_size", c_int64),
        ("block_stride", c_int64),
        ("inputs_offset", c_int64),
        ("conv_weight", c_void_p),
        ("rates", c_void_p),
        ("step_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("dtype", c_int32),
    )


class ShortConv(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("num_channels", c_int64),
        ("kernel_size", c_int64),
        ("block_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("dtype", c_int32),
    )


class TapeCall(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its arguments alive."""

    _fields_ = (("function", c_int32), ("num_patches", c_int32), ("arguments", c_int64 * 11))


class TapePatch(ctypes.Structure):
    """The struct of this name in kernels.h."""

    _fields_ = (
        ("argument", c_int32),
        ("base", c_int32),
        ("count", c_int32),
        ("per_count", c_int64),
        ("offset", c_int64),
    )


class RankGroup(ctypes.Structure):
    """The struct of this name in kernels.h. Whoever creates one must keep the memory behind its pointers alive."""

    _fields_ = (
        ("memory", c_void_p),
        ("pidfds", POINTER(c_int32)),
        ("piece_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("size", c_int32),
        ("rank", c_int32),
        ("num_pieces", c_uint32),
        ("is_waiting", c_int32),
    )


_ROWS = (c_void_p, c_int64)  # a pointer and the stride of its rows
_HEADS = (*_ROWS, c_int64)  # the same, and the stride of the heads
SIGNATURES: dict[str, list[Any]] = {  # Any: ctypes has no common type for them
    "inflight_bind_threads": [POINTER(c_int32), c_int32],
    "inflight_rms_norm": [*_ROWS, *_ROWS, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32],
    "inflight_norm_and_rotate": [*_HEADS, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int32],
    "inflight_linear": [*_ROWS, c_int32, *_ROWS, c_int32, c_int64, POINTER(LinearWeight)],
    "inflight_linear_of_heads": [*(*_HEADS, *_HEADS, c_int32, c_int64, c_int64), POINTER(LinearWeight)],
    "inflight_copy_heads": [*_HEADS, *_HEADS, c_int64, c_int64, c_int64, c_int32],
    "inflight_packed_size": [POINTER(LinearWeight), POINTER(c_int64), POINTER(c_int64)],
    "inflight_packed_features": [POINTER(LinearWeight), c_void_p],
    "inflight_pack_linear": [c_void_p, c_int32, c_void_p, c_void_p, POINTER(LinearWeight)],
    "inflight_quantize_weight": [
        *(*_ROWS, c_int32, c_int64, c_int64, c_int64, c_int32),
        *(c_void_p, c_void_p, c_void_p),
    ],
    "inflight_multiply_activation": [*_ROWS, *_ROWS, c_int64, c_int64, c_int32, c_int32],
    "inflight_add_and_scale": [*_ROWS, *_ROWS, *_ROWS, c_int64, c_int64, c_int32],
    "inflight_select_rows": [*_ROWS, c_void_p, c_void_p, c_int64, c_int64],
    "inflight_replay": [POINTER(TapeCall), c_int64, POINTER(TapePatch), POINTER(c_int64)],
    "inflight_apply_token_masks": [c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "inflight_attention_scratch_bytes": [c_int32, c_int32],
    "inflight_group_memory_bytes": [c_int32, c_int64],
    "inflight_all_reduce": [POINTER(RankGroup), c_void_p, c_int64, c_int32],
    "inflight_all_gather": [POINTER(RankGroup), c_void_p, c_void_p, c_int64, c_int64],
    "inflight_broadcast": [POINTER(RankGroup), c_void_p, c_int64],
    "inflight_leave_group": [POINTER(RankGroup)],
    "inflight_paged_attention": [
        *(*_ROWS, *_ROWS, *_ROWS, c_void_p, c_void_p),
        *(POINTER(AttentionStep), POINTER(HeadLayout), POINTER(AttentionParams)),
    ],
    "inflight_gated_delta": [*_ROWS, c_void_p, c_void_p, POINTER(AttentionStep), POINTER(GatedDelta)],
    "inflight_short_conv": [*_ROWS, c_void_p, c_void_p, POINTER(AttentionStep), POINTER(ShortConv)],
}

# the other functions return nothing
_RESULTS = {
    "inflight_bind_threads": c_int32,
    "inflight_attention_scratch_bytes": c_int64,
    "inflight_group_memory_bytes": c_int64,
    "inflight_all_reduce": c_int32,
    "inflight_all_gather": c_int32,
    "inflight_broadcast": c_int32,
    "inflight_replay": c_int32,
}


class Taped(NamedTuple):
    """What a recorder must know of a function: the indices of two arguments."""

    rows: int | None  # the number of rows, or a multiple of it
    out: int | None  # the pointer to the result; None: the function changes its input


TAPED = {  # the functions that a tape may call, in the order of `kFunctions` in tape.cpp
    "inflight_rms_norm": Taped(rows=6, out=5),
    "inflight_norm_and_rotate": Taped(rows=6, out=None),
    "inflight_linear": Taped(rows=6, out=3),
    "inflight_paged_attention": Taped(rows=None, out=6),
    "inflight_select_rows": Taped(rows=4, out=3),
    "inflight_all_reduce": Taped(rows=2, out=None),
    "inflight_all_gather": Taped(rows=3, out=2),
    "inflight_gated_delta": Taped(rows=None, out=2),
    "inflight_multiply_activation": Taped(rows=4, out=None),
    "inflight_add_and_scale": Taped(rows=6, out=None),
    "inflight_short_conv": Taped(rows=None, out=2),
    "inflight_linear_of_heads": Taped(rows=7, out=3),
    "inflight_copy_heads": Taped(rows=6, out=3),
}


class CallRecorder(Protocol):
    def add(self, name: str, arguments: Sequence[Any]) -> None:
        """Called after a function of the library has returned."""


class Recording(threading.local):
    """The recorder of each thread's calls, or None."""

    recorder: CallRecorder | None = None


class KernelLibrary(ctypes.CDLL):
    """The functions of kernels.h. `recording` says who records the calls of a thread."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.recording = Recording()


class KernelsUnavailableError(Exception):
    """The kernels cannot be used on this machine; the message gives the reason. `load_kernels` handles it."""


def load_kernels() -> KernelLibrary | None:
    """Returns the library, or None if the kernels are switched off or cannot be used. Then the engine computes in plain torch,
    and the reason is logged once.

    The environment variable `INFLIGHT_CPU_KERNELS` is "auto", "off", or the name of an instruction set.

    Raises:
        ConfigError: the requested instruction set cannot be used here, or `INFLIGHT_REQUIRE_KERNELS` is 1 and no instruction
            set can be used.
    """
    return _load(envs.cpu_kernels(), envs.require_kernels())


@functools.cache
def _load(wanted: str, required: bool) -> KernelLibrary | None:
    if wanted == "off":
        return None
    try:
        return open_kernels(wanted)
    except KernelsUnavailableError as error:
        if required or wanted != "auto":
            raise ConfigError(f"the C++ kernels cannot be used: {error}") from error
        logger.warning("no C++ kernels: plain torch serves instead, which is slower: %s", error)
        return None


def open_kernels(wanted: str) -> KernelLibrary:
    """Opens the library for the instruction set `wanted`. "auto" means the best set that this processor has.

    Raises:
        KernelsUnavailableError: the library cannot be used; the message gives the reason.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise KernelsUnavailableError(
            f"they are for Linux on x86-64, and this is {platform.system()} {platform.machine()}"
        )
    flags = _processor_flags()
    usable = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    if wanted != "auto" and wanted not in usable:
        known = ", ".join(INSTRUCTION_SETS)
        raise KernelsUnavailableError(
            f"{wanted!r} cannot be used: of the sets {known}, this processor has {', '.join(usable) or 'none'}"
        )
    if not usable:
        raise KernelsUnavailableError("the processor has no AVX2")
    chosen = usable[0] if wanted == "auto" else wanted
    path = _FOLDER / f"_{chosen}.so"
    if not path.exists():
        raise KernelsUnavailableError(_why_missing(path))
    _share_openmp_runtime()
    try:
        library = KernelLibrary(path)
    except OSError as error:
        raise KernelsUnavailableError(f"{path.name} cannot be loaded: {error}") from error
    _check_sources(library, path)
    for name, argument_types in SIGNATURES.items():
        function = library[name]
        function.argtypes, function.restype = argument_types, _RESULTS.get(name)
        setattr(library, name, _recordable(library.recording, name, function))
    return library


def _why_missing(path: Path) -> str:
    for installed in metadata.distributions(name="inflight-llm"):
        built = Path(str(installed.locate_file("inflight/kernels/cpu"))) / path.name
        if built.exists():
            return (
                f"the sources in {_FOLDER.parents[1]} are imported in place of the installed {built.parents[2]}; start in "
                "another folder, or without it in PYTHONPATH"
            )
    return f"{path.name} was not built; install a C++ compiler, then inflight again (the output of the install has the reason)"


def _recordable(recording: Recording, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:  # Any: what ctypes converts
        result = function(*arguments)
        if recording.recorder is not None:
            recording.recorder.add(name, arguments)
        return result

    return call


def _check_sources(library: KernelLibrary, path: Path) -> None:
    """Refuses a library that was built from older sources: an editable install does not rebuild its libraries by itself."""
    if not source_files(_FOLDER):
        return  # a wheel contains no sources
    library.inflight_source_hash.restype = c_char_p
    if library.inflight_source_hash().decode() != source_digest(_FOLDER):
        raise KernelsUnavailableError(
            f"{path.name} was built from other sources or with other flags; run `pip install -e .` again"
        )


def _processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _share_openmp_runtime() -> None:
    """Makes torch's OpenMP runtime visible to the library, which is not linked to a runtime of its own."""
    mapped = dict.fromkeys(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line)
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    of_torch = [path for path in runtimes if path.startswith(str(Path(torch.__file__).parent))]
    for path in [*of_torch, *runtimes, "libgomp.so.1"]:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise KernelsUnavailableError("no OpenMP runtime was found")


def bind_threads(kernels: KernelLibrary, cores: Sequence[int]) -> None:
    """Binds thread i of the calling thread's OpenMP pool to `cores[i]`. The calling thread is thread 0 and may use all `cores`.

    OpenMP may end threads and later start new ones. New threads inherit the cores of the calling thread. If the calling thread
    were bound to one core, all new threads would run on that core. While the other threads compute, only `cores[0]` is free for
    the calling thread, so it runs there without being bound.

    Raises:
        ConfigError: the operating system refuses.
    """
    if not cores or min(cores) < 0:
        raise ConfigError(f"compute threads need cores, not {list(cores)}")
    error = kernels.inflight_bind_threads((ctypes.c_int32 * len(cores))(*cores), len(cores))
    if error:
        raise ConfigError(
            f"compute threads cannot be bound to cores {', '.join(map(str, cores))}: {os.strerror(error)}; "
            "set cpu_threads_bind='off'"
        )
    os.sched_setaffinity(0, cores)
