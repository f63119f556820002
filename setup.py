"""Builds the CPU kernels, once per instruction set, as plain shared libraries. Everything else stands in pyproject.toml.

They are optional: where no compiler is, or another processor, the install goes on without them and plain torch serves.
`INFLIGHT_REQUIRE_KERNELS=1` makes a failed build fail the install.
"""

import os
import platform
import runpy
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
