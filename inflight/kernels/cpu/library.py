"""Loads the library of C++ kernels for the processor's best instruction set, and binds the kernels' threads to cores.

There is one library per instruction set. `pip install` builds the libraries (setup.py). They use neither Python nor torch:
their functions have pointers as arguments and are called through ctypes, which releases the interpreter lock. The kernels run
in the OpenMP pool of torch, because two pools on the same cores would wait for each other.
"""

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Sequence
from ctypes import c_char_p, c_long
from importlib import metadata
from pathlib import Path

import torch

from inflight import envs
from inflight.errors import ConfigError
from inflight.kernels.cpu.compile_flags import source_digest, source_files
from inflight.kernels.cpu.functions import RESULTS, SIGNATURES
from inflight.kernels.cpu.recording import KernelLibrary, recordable

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_AVX2 = frozenset("avx avx2 bmi1 bmi2 f16c fma movbe".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni".split())
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_AMX = "avx512_amx"
_AVX2_VNNI = "avx2_vnni"
_UNKNOWN_TO_OLD_COMPILERS = (_AMX, _AVX2_VNNI, "neon_bf16")
# Instruction set -> the processor flags that it needs, as /proc/cpuinfo spells them. The best set of a machine comes first.
INSTRUCTION_SETS = {
    _AMX: _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    _AVX2_VNNI: _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "neon_bf16": {"asimd", "asimddp", "bf16", "i8mm"},
    "neon_dotprod": {"asimd", "asimddp"},
    "neon": {"asimd"},
}
# The system call arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_REQUEST_TILE_REGISTERS = tuple(map(c_long, (158, 0x1023, 18)))


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
    if platform.system() != "Linux":
        raise KernelsUnavailableError(f"they are for Linux, and this is {platform.system()}")
    flags = _processor_flags()
    usable = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    if not usable or (wanted != "auto" and wanted not in usable):
        known = ", ".join(INSTRUCTION_SETS)
        raise KernelsUnavailableError(
            f"{wanted!r} cannot be used: of the sets {known}, this processor has {', '.join(usable) or 'none'}"
        )
    chosen = usable[0] if wanted == "auto" else wanted
    if wanted == "auto" and chosen in _UNKNOWN_TO_OLD_COMPILERS and _path(usable[1]).exists():
        # an operating system may not permit AMX, either: the next set computes the same, only slower
        is_served = _path(chosen).exists() and (chosen != _AMX or _may_use_tile_registers())
        chosen = chosen if is_served else usable[1]
    path = _path(chosen)
    if not path.exists():
        raise KernelsUnavailableError(_why_missing(path))
    if chosen == _AMX and not _may_use_tile_registers():
        raise KernelsUnavailableError(
            f"{chosen!r} cannot be used: the operating system refuses the tile registers of AMX"
        )
    _share_openmp_runtime()
    try:
        library = KernelLibrary(path, chosen)
    except OSError as error:
        raise KernelsUnavailableError(f"{path.name} cannot be loaded: {error}") from error
    _check_sources(library, path)
    for name, argument_types in SIGNATURES.items():
        function = library[name]
        function.argtypes = argument_types
        function.restype = RESULTS.get(name)
        setattr(library, name, recordable(library.recording, name, function))
    return library


def _path(instruction_set: str) -> Path:
    return _FOLDER / f"_{instruction_set}.so"


def _may_use_tile_registers() -> bool:
    """Asks the operating system for the tile registers. All threads of the process get them, also those that start later."""
    return not ctypes.pythonapi.syscall(*_REQUEST_TILE_REGISTERS)


def _why_missing(path: Path) -> str:
    for installed in metadata.distributions(name="inflight-llm"):
        built = Path(str(installed.locate_file("inflight/kernels/cpu"))) / path.name
        if built.exists():
            return (
                f"the sources in {_FOLDER.parents[1]} are imported in place of the installed {built.parents[2]}; start in "
                "another folder, or without it in PYTHONPATH"
            )
    return f"{path.name} was not built; install a C++ compiler, then inflight again (the output of the install has the reason)"


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
        if line.startswith(("flags", "Features")):  # x86-64, and ARM
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _share_openmp_runtime() -> None:
    """Makes torch's OpenMP runtime visible to the library, which is not linked to a runtime of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = dict.fromkeys(line.split()[-1] for line in lines if "/" in line)
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    # the operating system names mapped files without symbolic links
    of_torch = [path for path in runtimes if Path(path).is_relative_to(Path(torch.__file__).resolve().parent)]
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
