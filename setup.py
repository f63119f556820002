"""Builds the CPU kernels, once per instruction set, as plain shared libraries. pyproject.toml says everything else.

The libraries use neither Python nor torch, so one wheel serves every Python.

The kernels are optional: without a C++ compiler, or on a processor that is neither x86-64 nor 64-bit ARM, the install goes on
without them, and plain torch does the arithmetic. With `INFLIGHT_REQUIRE_KERNELS=1` an install fails if one cannot be built.

Finished libraries are kept in the user's cache folder, so that the next clone, wheel or environment need not compile them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import runpy
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("inflight/kernels/cpu")
COMPILING = runpy.run_path(str(FOLDER / "compile_flags.py"))
BEGINNING = {"x86_64": "avx", "aarch64": "neon"}.get(platform.machine(), "no kernels for this machine")
INSTRUCTION_SETS = {
    name: flags for name, flags in COMPILING["INSTRUCTION_SET_FLAGS"].items() if name.startswith(BEGINNING)
}
OLDEST_GLIBC = 28  # minor version: torch's own wheels need glibc 2.28
# In the cache folder: those of the last eight states of the sources, 50 MB
KEPT_LIBRARIES = 8 * len(INSTRUCTION_SETS)


def extensions() -> list[Extension]:
    if platform.system() != "Linux":
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
        for name, flags in INSTRUCTION_SETS.items()
    ]


class BuildKernels(build_ext):
    """Builds a library only if there is none that was built from these very sources. All files are compiled side by side.

    Every library holds the digest of its sources, and the digest decides. The times of files cannot: an old library in build/
    may look newer than the sources, and would then be shipped. A library that `pip install -e .` has built beside the sources
    is copied, and so is one of the cache folder.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """`inflight/kernels/cpu/_avx2.so`. setuptools would put the version of Python into the name."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        self.objects: dict[str, list[Future[list[str]]]] = {}
        missing = [ext for ext in self.extensions if not self.find_library(ext)]
        units = [(ext, source) for ext in missing for source in ext.sources]
        units.sort(key=lambda unit: -os.path.getsize(unit[1]))  # the longest first, so that no core waits at the end
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                for ext, source in units:
                    self.objects.setdefault(ext.name, []).append(pool.submit(self.compile_unit, ext, source))
                super().build_extensions()
            finally:
                pool.shutdown(cancel_futures=True)

    def build_extension(self, ext: Extension) -> None:
        """Links one library. Errors of its compiler are raised here, where setuptools knows whether the library is optional."""
        if ext.name not in self.objects:
            return
        objects = [path for unit in self.objects[ext.name] for path in unit.result()]
        built = Path(self.get_ext_fullpath(ext.name))
        self.compiler.link_shared_object(sorted(objects), str(built), target_lang=ext.language)
        cached = self.cached_library(ext)
        if cached is not None:
            keep_library(built, cached)

    def compile_unit(self, ext: Extension, source: str) -> list[str]:
        return self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp) / ext.name),
            macros=ext.define_macros,
            extra_postargs=ext.extra_compile_args,
        )

    def find_library(self, ext: Extension) -> bool:
        """Whether the library is in its place now. One with another digest has been removed from there."""
        built, digest = Path(self.get_ext_fullpath(ext.name)), dict(ext.define_macros)["INFLIGHT_SOURCE_HASH"]
        for library in (built, FOLDER / built.name, self.cached_library(ext)):
            content = read_library(library, digest)
            if library is not None and content is not None:
                if library != built:
                    built.parent.mkdir(parents=True, exist_ok=True)
                    built.write_bytes(content)
                    with contextlib.suppress(OSError):
                        os.utime(library)  # the cache folder keeps what was used last
                return True
        built.unlink(missing_ok=True)
        return False

    def cached_library(self, ext: Extension) -> Path | None:
        """The path that the library has or would have in the cache folder. The name depends on all that makes the library."""
        folder = cache_folder()
        command = [*self.compiler.compiler_so_cxx, *ext.extra_compile_args]
        try:
            version = subprocess.run([*command, "--version"], capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
        made_by = repr((command, self.compiler.linker_so_cxx, ext.define_macros, version))
        name = f"{ext.name.rpartition('.')[2]}-{hashlib.sha256(made_by.encode()).hexdigest()}.so"
        return None if folder is None else folder / name


def read_library(library: Path | None, digest: str) -> bytes | None:
    """The bytes of a library that was built from the sources with this digest; None if it was not, or is not there."""
    with contextlib.suppress(OSError):
        if library is not None and digest.encode() in (content := library.read_bytes()):
            return content
    return None


def cache_folder() -> Path | None:
    """`inflight/kernels` in the user's cache folder. None if it cannot be made, or if it is another user's: its owner decides
    which code is loaded from it.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        return None  # a user without a home folder
    folder = Path(base, "inflight", "kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder if folder.stat().st_uid == os.geteuid() else None
    except OSError:
        return None


def keep_library(built: Path, cached: Path) -> None:
    """Copies a library into the cache folder, under its name only when it is whole: other installs may read and write there.
    The libraries that were not used for longest are deleted. A folder that cannot be written is no error.
    """
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=cached.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(built.read_bytes())
                os.fsync(file.fileno())
            os.replace(temporary, cached)
        except OSError:
            os.unlink(temporary)
        by_use = sorted(cached.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in by_use[:-KEPT_LIBRARIES]:
            path.unlink(missing_ok=True)


class BuildWheel(bdist_wheel):
    """Names the wheel after what it needs: no version of Python, and the glibc of its libraries. A wheel without libraries
    needs no platform."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = [path.read_bytes() for path in Path(self.bdist_dir or "").rglob("*.so")]
        if not libraries:
            return "py3", "none", "any"
        if platform.libc_ver()[0] != "glibc":
            return "py3", "none", super().get_tag()[2]
        needed = (int(minor) for library in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library))
        return "py3", "none", f"manylinux_2_{max(OLDEST_GLIBC, *needed)}_{platform.machine()}"


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": BuildWheel})
