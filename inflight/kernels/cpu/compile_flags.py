"""The compiler's flags for the C++ kernels, and a digest of sources and flags, by which a stale library is recognised.

`setup.py` runs this file by its path, before anything is installed, so it may import only the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

INSTRUCTION_SET_FLAGS = {  # library.py lists what a processor must have for each of these names
    "avx2": ["-march=x86-64-v3"],
    "avx2_vnni": ["-march=x86-64-v3", "-mavxvnni"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
    "avx512_amx": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "neon": ["-march=armv8-a"],
    "neon_dotprod": ["-march=armv8.2-a+dotprod"],
    "neon_bf16": ["-march=armv8.2-a+dotprod+bf16+i8mm"],
}
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    # Python's own flags ask for debug information, which takes 40 % of the compiler's time and nine tenths of a library
    "-g0",
    # given to the compiler, not to the linker: at run time the library uses the OpenMP runtime that torch has loaded
    "-fopenmp",
    # a cell of the KV cache holds int8 and their float scales, which are read through pointers into the same memory
    "-fno-strict-aliasing",
    "-fno-exceptions",
    # a compiler that may make one fma of a product and a sum does it in one loop and not in another: bits would differ
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own intrinsics
    "-Wno-uninitialized",
]


def source_files(folder: Path) -> list[Path]:
    """The C++ files of the folder, in a fixed order. A wheel has none."""
    return [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.h"))]


def source_digest(folder: Path) -> str:
    """SHA-256 over the C++ files of the folder and its compile_flags.py: a library with another digest is stale."""
    files = [*source_files(folder), folder / "compile_flags.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
