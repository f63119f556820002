"""Builds the CPU kernels, once per instruction set, as plain shared libraries. Everything else stands in pyproject.toml.

They are optional: where no compiler is, or another processor, the install goes on without them and plain torch serves.
`INFLIGHT_REQUIRE_KERNELS=1` makes a failed build fail the install.
"""

import hashlib
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("inflight/kernels/cpu")
FLAGS = {  # the names stand in inflight/kernels/cpu/library.py, with what the processor must have
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}

WARNINGS = ["-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC 12 warns of its own intrinsics


def extensions() -> list[Extension]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    sources, headers = sorted(FOLDER.glob("*.cpp")), sorted(FOLDER.glob("*.h"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, *headers])).hexdigest()
    return [
        Extension(
            f"inflight.kernels.cpu._{name}",
            [str(path) for path in sources],
            depends=[str(path) for path in headers],
            define_macros=[("INFLIGHT_SOURCE_HASH", digest)],
            # -fopenmp not when linking: the library uses the OpenMP runtime that torch has loaded, there must be only one
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fopenmp",
                "-fno-exceptions",
                "-fvisibility=hidden",
                *WARNINGS,
                *flags,
            ],
            language="c++",
            optional=os.environ.get("INFLIGHT_REQUIRE_KERNELS") != "1",
        )
        for name, flags in FLAGS.items()
    ]


class BuildKernels(build_ext):
    """Goes by what a library says that it was built from. By their times, what an older build has left in build/ may seem newer
    than the sources, and would be shipped; where the compiler fails, too."""

    def build_extension(self, ext: Extension) -> None:
        built, digest = Path(self.get_ext_fullpath(ext.name)), dict(ext.define_macros)["INFLIGHT_SOURCE_HASH"]
        if built.exists() and digest.encode() in built.read_bytes():
            return
        built.unlink(missing_ok=True)
        self.force = True
        super().build_extension(ext)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
