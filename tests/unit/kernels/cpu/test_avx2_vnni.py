"""The library `avx2_vnni` against `avx2`: sums of integers are exact, and all that follows is computed in the same order, so
results are equal bit for bit.

Processors with AVX-512 VNNI have the same instruction in another encoding. There this file compiles the sources with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inflight.config.architecture import SILU
from inflight.kernels.cpu import compile_flags, library
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.packing import pack_integers
from inflight.kernels.cpu.recording import KernelLibrary
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.integer_weights import INTEGER_WEIGHTS, integer_weight
from tests.unit.kernels.cpu.test_experts import BITS, HIDDEN_SIZE, Layer, draw, spec_of

VNNI = "avx2_vnni"
HAS_OTHER_ENCODING = "avx512" in INSTRUCTION_SETS_HERE
pytestmark = pytest.mark.skipif(
    VNNI not in INSTRUCTION_SETS_HERE and not HAS_OTHER_ENCODING, reason=f"no VNNI here: {INSTRUCTION_SETS_HERE}"
)
NUM_ROWS = [1, 2, 7, 12, 13, 40]


def compile_other_encoding(folder: Path) -> None:
    sources = library._FOLDER
    flags = [*compile_flags.COMMON_FLAGS, *compile_flags.INSTRUCTION_SET_FLAGS["avx2"], "-fPIC", "-DINFLIGHT_EVEX_VNNI"]
    flags.append(f"-DINFLIGHT_SOURCE_HASH={compile_flags.source_digest(sources)}")
    units = sorted(sources.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [folder / f"{path.stem}.o" for path in units]

    def compile_unit(source: Path, made: Path) -> None:
        is_called = source.stem.startswith(("linear", "experts"))  # the others only have to be there
        level = ["-O3" if is_called else "-O0"]
        subprocess.run(["g++", *flags, *level, "-c", source, "-o", made], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_unit, units, objects))
    subprocess.run(["g++", "-shared", *objects, "-o", folder / f"_{VNNI}.so"], check=True)


@pytest.fixture(scope="module", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if VNNI in INSTRUCTION_SETS_HERE:
        yield
        return
    folder = tmp_path_factory.mktemp("kernels")
    compile_other_encoding(folder)
    path, flags = library._path, library._processor_flags()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_path", lambda name: folder / f"_{VNNI}.so" if name == VNNI else path(name))
        patch.setattr(library, "_processor_flags", lambda: flags | {"avx_vnni"})
        yield


def both() -> tuple[KernelLibrary, KernelLibrary]:
    return library.open_kernels("avx2"), library.open_kernels(VNNI)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size", "num_groups", "zero"), INTEGER_WEIGHTS)
def test_products_are_those_of_avx2(
    bits: int, group_size: int, num_groups: int, zero: str, x_dtype: torch.dtype
) -> None:
    weight = integer_weight(bits, group_size, num_groups, zero)
    bias = draw(1, 70)
    without, with_vnni = (pack_integers(kernels, HugePages(), weight, bias, gate=None) for kernels in both())
    x = draw(3, max(NUM_ROWS), weight.shape[1]).to(x_dtype)
    x[::3, [1, weight.shape[1] - 1]] *= 50  # outliers, in some rows
    for num_rows in NUM_ROWS:
        rows = x[-num_rows:]
        assert torch.equal(with_vnni(rows, torch.float32), without(rows, torch.float32)), num_rows


def test_the_largest_bytes_do_not_overflow() -> None:
    """All bytes of the weight are 255, all of the activations 127 or -127: two products of them do not fit 16 bits."""
    weight = integer_weight(8, 256, 4, "offsets")
    weight.values.fill_(255)
    x = torch.ones(3, weight.shape[1])
    x[1] = -1
    without, with_vnni = (pack_integers(kernels, HugePages(), weight, None, gate=None) for kernels in both())
    truth = x.double() @ weight.dequantize().double().T
    for layer in (without, with_vnni):
        torch.testing.assert_close(layer(x, torch.float32).double(), truth, rtol=2e-3, atol=1e-3)  # scales are float16


@pytest.mark.parametrize("kind", [kind for kind, bits in BITS.items() if bits <= 8])
def test_experts_are_those_of_avx2(kind: str) -> None:
    spec = spec_of(activation=SILU)
    hidden, logits = draw(3, 40, HIDDEN_SIZE).bfloat16(), draw(7, 40, 7)
    with_vnni, without = (
        Layer(name, spec, torch.bfloat16, BITS[kind], has_table=kind == "table") for name in (VNNI, "avx2")
    )
    assert torch.equal(with_vnni(hidden, logits)[1], without(hidden, logits)[1])
