"""Builds the CPU kernels, once per instruction set, as plain shared libraries. pyproject.toml says everything else.

The kernels are optional: without a C++ compiler, or on a processor that is not x86-64, the install goes on without them, and
plain torch does the arithmetic. With `INFLIGHT_REQUIRE_KERNELS=1` an install fails if a kernel cannot be built.
"""

import os
import platform
import runpy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("inflight/kernels/cpu")
COMPILING = runpy.run_path(str(FOLDER / "compile_flags.py"))


def extensions() -> list[Extension]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    files = COMPILING["source_files"](FOLDER)
    return [
        Extension(
            f"inflight.kernels.cpu._{name}",
            [str(path) for path in files if path.suffix == ".cpp"],
            depends=[str(path) for path in files if path.suffix == ".h"],
            define_macros=[("INFLIGHT_SOURCE_HASH", COMPILING["source_digest"](FOLDER))],
            extra_compile_args=[*COMPILING["COMMON_FLAGS"], *flags],
            language="c++",
            optional=os.environ.get("INFLIGHT_REQUIRE_KERNELS") != "1",
        )
        for name, flags in COMPILING["INSTRUCTION_SET_FLAGS"].items()
    ]


class BuildKernels(build_ext):
    """Builds a library only if there is none that was built from these very sources.

    Every library holds the digest of its sources, and the digest decides. The times of files cannot: an old library in build/
    may look newer than the sources, and would then be shipped. A library that `pip install -e .` has built beside the sources
    is copied.
    """

    def build_extension(self, ext: Extension) -> None:
        built, digest = Path(self.get_ext_fullpath(ext.name)), dict(ext.define_macros)["INFLIGHT_SOURCE_HASH"]
        beside_the_sources = FOLDER / built.name
        for library in (built, beside_the_sources):
            if library.exists() and digest.encode() in library.read_bytes():
                if library != built:
                    built.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(library, built)
                return
        built.unlink(missing_ok=True)
        self.force = True
        super().build_extension(ext)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
