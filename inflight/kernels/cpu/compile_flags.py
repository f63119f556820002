"""How the C++ kernels are compiled; and the digest of the sources and of this file, by which a stale library is found.

`setup.py` runs this file by its path, before anything is installed: it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

INSTRUCTION_SET_FLAGS = {  # the names stand in library.py, with what the processor must have
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    # for the compiler only, not for the linker: the library uses the OpenMP runtime that torch has loaded; there must be one
    "-fopenmp",
    # a cell of the cache holds integers and their float scales: both are read through pointers into the same memory
    "-fno-strict-aliasing",
    "-fno-exceptions",
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
