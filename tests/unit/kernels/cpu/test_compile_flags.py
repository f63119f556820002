"""setup.py compiles a small set of sources here: what is compiled when, and what the user's cache folder has to do with it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.kernels.cpu.compile_flags import INSTRUCTION_SET_FLAGS
from tests.architecture.source import ROOT

SOURCES = Path("inflight", "kernels", "cpu")
HASH_CPP = """
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
extern "C" __attribute__((visibility("default"))) const char* inflight_source_hash() { return TEXT(INFLIGHT_SOURCE_HASH); }
"""
SUM_CPP = 'extern "C" __attribute__((visibility("default"))) int inflight_sum(int a, int b) { return a + b; }\n'
NUM_LIBRARIES = sum(name.startswith("avx") for name in INSTRUCTION_SET_FLAGS)
NUM_UNITS = 2 * NUM_LIBRARIES

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="the kernels are compiled on Linux on x86-64, by a C++ compiler",
)


class Clone:
    """A folder with setup.py and two small sources, and a compiler that writes a line for each source that it compiles."""

    def __init__(self, folder: Path, cache: Path, compiler: str = "") -> None:
        self.folder, self.cache = folder, cache
        (folder / SOURCES).mkdir(parents=True)
        shutil.copy(ROOT / "setup.py", folder)
        shutil.copy(ROOT / SOURCES / "compile_flags.py", folder / SOURCES)
        (folder / SOURCES / "hash.cpp").write_text(HASH_CPP)
        (folder / SOURCES / "sum.cpp").write_text(SUM_CPP)
        script = f'#!/bin/sh\ncase " $* " in *" -c "*) echo >>"$COMPILED"; {compiler};; esac\nexec c++ "$@"\n'
        self.compiler = cache.parent / f"compiler-{hash(compiler)}"  # its path is a part of the key
        self.compiler.write_text(script.replace("; ;;", ";;"))
        self.compiler.chmod(0o755)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_")}
        own = {
            "XDG_CACHE_HOME": str(self.cache),
            "CXX": str(self.compiler),
            "COMPILED": str(self.folder / "compiled"),
            "INFLIGHT_REQUIRE_KERNELS": "1",
        }
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=kept | own | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def build(self, **variables: str) -> str:
        process = self.start(**variables)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def num_compiled(self) -> int:
        path = self.folder / "compiled"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def libraries(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / SOURCES).glob("*.so")}

    def cached(self) -> list[Path]:
        return sorted((self.cache / "inflight" / "kernels").iterdir())


def test_the_second_clone_compiles_nothing(tmp_path: Path) -> None:
    first, second = (Clone(tmp_path / name, tmp_path / "cache") for name in ("first", "second"))
    first.build()
    assert first.num_compiled() == NUM_UNITS
    assert len(first.cached()) == NUM_LIBRARIES
    second.build()
    assert second.num_compiled() == 0
    assert second.libraries() == first.libraries()
    assert len(second.libraries()) == NUM_LIBRARIES


@pytest.mark.parametrize("difference", ["a source", "a flag", "the compiler", "CXXFLAGS"])
def test_what_a_library_depends_on_is_compiled_again(tmp_path: Path, difference: str) -> None:
    Clone(tmp_path / "first", tmp_path / "cache").build()
    second = Clone(tmp_path / "second", tmp_path / "cache", "true" if difference == "the compiler" else "")
    flags = second.folder / SOURCES / "compile_flags.py"
    if difference == "a source":
        (second.folder / SOURCES / "sum.cpp").write_text(SUM_CPP.replace("a + b", "b + a"))
    if difference == "a flag":
        flags.write_text(flags.read_text().replace('"-O3"', '"-O2"'))
    second.build(**({"CXXFLAGS": "-DX=1"} if difference == "CXXFLAGS" else {}))
    assert second.num_compiled() == NUM_UNITS
    assert len(second.cached()) == 2 * NUM_LIBRARIES


def test_a_cached_library_with_another_digest_is_not_used(tmp_path: Path) -> None:
    first, second = (Clone(tmp_path / name, tmp_path / "cache") for name in ("first", "second"))
    first.build()
    for path in first.cached():
        path.write_bytes(b"\x7fELF of older sources")
    second.build()
    assert second.num_compiled() == NUM_UNITS
    assert second.libraries() == first.libraries()
    assert {path.read_bytes() for path in second.cached()} == set(first.libraries().values())


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    clone = Clone(tmp_path / "clone", tmp_path / "cache")
    clone.build()
    assert len(clone.libraries()) == NUM_LIBRARIES


def test_the_cache_keeps_the_libraries_that_were_used_last(tmp_path: Path) -> None:
    first, second, third = (Clone(tmp_path / name, tmp_path / "cache") for name in ("first", "second", "third"))
    first.build()
    for age, path in enumerate(first.cached()):
        os.utime(path, (1000 + age, 1000 + age))
    for number in range(30):
        path = first.cache / "inflight" / "kernels" / f"_avx2-{number}.so"
        path.write_bytes(b"")
        os.utime(path, (2000 + number, 2000 + number))
    second.build()  # it uses the three oldest
    (third.folder / SOURCES / "sum.cpp").write_text(SUM_CPP.replace("a + b", "b + a"))
    third.build()
    assert len(third.cached()) == 8 * NUM_LIBRARIES
    kept = {path.read_bytes() for path in third.cached()} - {b""}
    assert kept == {*second.libraries().values(), *third.libraries().values()}


def test_two_installs_at_once(tmp_path: Path) -> None:
    clones = [Clone(tmp_path / name, tmp_path / "cache") for name in ("first", "second")]
    for process in [clone.start() for clone in clones]:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    assert clones[0].libraries() == clones[1].libraries()
    assert {path.read_bytes() for path in clones[0].cached()} == set(clones[0].libraries().values())
    assert len(clones[0].cached()) == NUM_LIBRARIES  # and no half-written file


def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    clone = Clone(tmp_path / "clone", tmp_path / "cache")
    (clone.folder / SOURCES / "sum.cpp").write_text("this is not C++\n")
    assert "failed" in clone.build(INFLIGHT_REQUIRE_KERNELS="0")
    assert clone.libraries() == {}
    assert clone.cached() == []
    process = clone.start()
    process.communicate(timeout=300)
    assert process.returncode != 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core compiles one source at a time")
def test_sources_are_compiled_side_by_side(tmp_path: Path) -> None:
    """No compiler goes on before a second one has begun."""
    wait = 'for _ in $(seq 600); do [ "$(wc -l <"$COMPILED")" -ge 2 ] && exec c++ "$@"; sleep 0.1; done; exit 1'
    Clone(tmp_path / "clone", tmp_path / "cache", wait).build()
