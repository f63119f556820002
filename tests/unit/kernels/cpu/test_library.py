"""Which library is loaded, and what happens where there is none."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from inflight.kernels.cpu import library
from inflight.kernels.layer_ops import TorchLayerOps
from inflight.layers.context import select_layer_ops
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    monkeypatch.delenv("INFLIGHT_CPU_KERNELS", raising=False)
    monkeypatch.delenv("INFLIGHT_REQUIRE_KERNELS", raising=False)


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As where no compiler was found."""
    monkeypatch.setattr(library, "_FOLDER", folder)


@needs_kernels
def test_the_best_instruction_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load_kernels()
    assert loaded is not None
    assert f"_{INSTRUCTION_SETS_HERE[0]}." in loaded._name


@needs_kernels
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_one_can_be_forced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", name)
    loaded = library.load_kernels()
    assert loaded is not None
    assert f"_{name}." in loaded._name


def test_off_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert library.load_kernels() is None
    assert isinstance(select_layer_ops(torch.device("cpu"), torch.bfloat16), TorchLayerOps)


@pytest.mark.parametrize("wanted", ["avx1024", "AVX2"])
def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", wanted)
    with pytest.raises(ConfigError, match=wanted):
        library.load_kernels()


@needs_kernels
def test_a_processor_without_avx2(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset({"sse2"}))
    assert library.load_kernels() is None
    assert "of the sets avx512_amx, " in caplog.text and "this processor has none" in caplog.text


@needs_kernels
def test_a_system_that_refuses_the_registers_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next set serves. To ask for AMX is an error."""
    monkeypatch.setattr(library, "_processor_flags", lambda: library.INSTRUCTION_SETS["avx512_amx"])
    monkeypatch.setattr(library, "_may_use_tile_registers", lambda: False)
    assert library.open_kernels("auto").instruction_set == "avx512_bf16"
    with pytest.raises(library.KernelsUnavailableError, match="refuses the tile registers"):
        library.open_kernels("avx512_amx")


@needs_kernels
def test_a_compiler_that_does_not_know_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next set serves, unless it is missing, too."""
    monkeypatch.setattr(library, "_processor_flags", lambda: library.INSTRUCTION_SETS["avx512_amx"])
    (tmp_path / "_avx512_bf16.so").write_bytes((library._FOLDER / "_avx512_bf16.so").read_bytes())
    hide(monkeypatch, tmp_path)
    monkeypatch.setattr(library.metadata, "distributions", lambda name: [])  # the installed package may be elsewhere
    assert library.open_kernels("auto").instruction_set == "avx512_bf16"
    (tmp_path / "_avx512_bf16.so").unlink()
    with pytest.raises(library.KernelsUnavailableError, match=r"_avx512_amx\.so was not built"):
        library.open_kernels("auto")


@needs_kernels
def test_vnni_of_256_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It comes before AVX2 and behind AVX-512, and a compiler may not know it."""
    with_vnni = library.INSTRUCTION_SETS["avx2_vnni"]
    assert library.INSTRUCTION_SETS["avx2"] < with_vnni
    sets = list(library.INSTRUCTION_SETS)
    assert sets.index("avx512") < sets.index("avx2_vnni") < sets.index("avx2")
    monkeypatch.setattr(library, "_processor_flags", lambda: with_vnni)
    assert library.open_kernels("auto").instruction_set == "avx2_vnni"
    (tmp_path / "_avx2.so").write_bytes((library._FOLDER / "_avx2.so").read_bytes())
    hide(monkeypatch, tmp_path)
    monkeypatch.setattr(library.metadata, "distributions", lambda name: [])  # the installed package may be elsewhere
    assert library.open_kernels("auto").instruction_set == "avx2"
    with pytest.raises(library.KernelsUnavailableError, match=r"_avx2_vnni\.so was not built"):
        library.open_kernels("avx2_vnni")


# Lines of /proc/cpuinfo, from a Graviton 3, a Raspberry Pi 5 and a Raspberry Pi 4
GRAVITON_3 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 "
    "asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)
RASPBERRY_PI_5 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
RASPBERRY_PI_4 = "fp asimd evtstrm crc32 cpuid"


@pytest.mark.parametrize(
    ("features", "best", "without_it"),
    [(GRAVITON_3, "neon_bf16", "neon_dotprod"), (RASPBERRY_PI_5, "neon_dotprod", None), (RASPBERRY_PI_4, "neon", None)],
)
def test_an_arm_processor(
    features: str, best: str, without_it: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`without_it`: what serves if an old compiler does not know the best set."""
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: {features}\n")
    monkeypatch.setattr(library, "KernelLibrary", lambda path, name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(library, "_share_openmp_runtime", lambda: None)
    hide(monkeypatch, tmp_path)
    names = [name for name in library.INSTRUCTION_SETS if name.startswith("neon")]
    for name in names[names.index(best) :]:
        (tmp_path / f"_{name}.so").touch()
    with pytest.raises(library.KernelsUnavailableError, match=f"cannot be loaded: {best}$"):
        library.open_kernels("auto")
    with pytest.raises(library.KernelsUnavailableError, match=r"'avx2' cannot be used: .* this processor has neon"):
        library.open_kernels("avx2")
    if without_it is not None:
        (tmp_path / f"_{best}.so").unlink()
        with pytest.raises(library.KernelsUnavailableError, match=f"cannot be loaded: {without_it}$"):
            library.open_kernels("auto")


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hide(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert library.load_kernels() is None
    assert len(caplog.records) == 1
    monkeypatch.setenv("INFLIGHT_REQUIRE_KERNELS", "1")
    with pytest.raises(ConfigError, match="cannot be used"):
        library.load_kernels()


@needs_kernels
def test_sources_that_hide_an_installed_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Started in the clone: the folder is the cause, not a compiler."""
    name = f"_{INSTRUCTION_SETS_HERE[0]}.so"
    built = tmp_path / "installed" / "inflight" / "kernels" / "cpu" / name
    built.parent.mkdir(parents=True)
    built.write_bytes((library._FOLDER / name).read_bytes())
    (tmp_path / "installed" / "inflight_llm-0.1.0.dist-info").mkdir()
    sources = tmp_path / "clone" / "inflight" / "kernels" / "cpu"
    sources.mkdir(parents=True)
    hide(monkeypatch, sources)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clone"), str(tmp_path / "installed")])
    with pytest.raises(library.KernelsUnavailableError) as caught:
        library.open_kernels("auto")
    assert str(tmp_path / "clone" / "inflight") in str(caught.value) and "start in another folder" in str(caught.value)
    built.unlink()
    with pytest.raises(library.KernelsUnavailableError, match="install a C\\+\\+ compiler"):
        library.open_kernels("auto")


@needs_kernels
@pytest.mark.parametrize(("file", "text"), [("attention.cpp", "// changed\n"), ("compile_flags.py", "# changed\n")])
def test_a_stale_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, text: str) -> None:
    for path in library._FOLDER.iterdir():
        if path.suffix in (".so", ".cpp", ".h") or path.name == "compile_flags.py":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    hide(monkeypatch, tmp_path)
    assert library.load_kernels() is not None
    with (tmp_path / file).open("a") as changed:
        changed.write(text)
    monkeypatch.setenv("INFLIGHT_REQUIRE_KERNELS", "1")
    with pytest.raises(ConfigError, match="other sources or with other flags"):
        library.load_kernels()


def test_without_kernels_a_model_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=0)
    prompts = [[5, 6, 7] * 40, [9], list(range(3, 60))]

    def tokens() -> list[list[int]]:
        with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=1 << 24) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]

    with_kernels = tokens()
    hide(monkeypatch, tmp_path / "nothing")
    assert tokens() == with_kernels


class Binding:
    """A library whose threads are bound, or not: `error` is what the system says."""

    def __init__(self, error: int) -> None:
        self.error, self.cores = error, list[int]()

    def inflight_bind_threads(self, cores: Any, count: int) -> int:
        self.cores += cores[:count]
        return self.error


def test_the_calling_thread_may_use_all_cores_of_the_bound_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = list[object]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: allowed.append((pid, list(cores))))
    bound: Any = Binding(0)
    library.bind_threads(bound, [3, 0])
    assert (bound.cores, allowed) == ([3, 0], [(0, [3, 0])])
    refused: Any = Binding(errno.EINVAL)
    with pytest.raises(ConfigError, match=r"cores 2, 5: .*cpu_threads_bind='off'"):
        library.bind_threads(refused, [2, 5])
    assert len(allowed) == 1


@needs_kernels
@pytest.mark.parametrize("missing", [False, True])
def test_an_openmp_runtime_that_cannot_be_loaded(
    missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one is tried. If there is none, there are no kernels."""
    real, tried = ctypes.CDLL, list[str]()

    def load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        tried.append(str(path))
        if missing or len(tried) == 1:
            raise OSError("it cannot be loaded")
        return real(path, mode=mode)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert (library.load_kernels() is None) == missing
    assert "torch" in Path(tried[0]).parts, "torch's own comes first"
    if missing:
        assert tried[-1] == "libgomp.so.1" and "no OpenMP runtime was found" in caplog.text
    else:
        assert len(tried) == 2


@needs_kernels
def test_torchs_own_openmp_runtime_is_found_behind_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel names mapped files without links. Another library may have mapped another runtime before."""
    (tmp_path / "site").symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    read, real, tried = Path.read_text, ctypes.CDLL, list[str]()

    def read_maps(path: Path, *arguments: Any) -> str:
        line = "7f0000000000-7f0000001000 r-xp 00000000 00:00 1 /other/libgomp.so.1\n"
        return (line if str(path) == "/proc/self/maps" else "") + read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_maps)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode=0: tried.append(str(path)) or real(path, mode=mode))
    assert library.load_kernels() is not None
    assert Path(tried[0]).is_relative_to(Path(torch.__file__).resolve().parent)


@needs_kernels
def test_a_wheel_has_no_sources_to_compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"_{INSTRUCTION_SETS_HERE[0]}.so"
    (tmp_path / name).write_bytes((library._FOLDER / name).read_bytes())
    hide(monkeypatch, tmp_path)
    assert library.load_kernels() is not None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / name).write_bytes(b"no library")
    hide(monkeypatch, tmp_path / "broken")
    with pytest.raises(library.KernelsUnavailableError, match=rf"{name} cannot be loaded"):
        library.open_kernels("auto")


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(library.KernelsUnavailableError, match="for Linux, and this is Darwin"):
        library.open_kernels("auto")
