"""The kernels for ARM, under an emulator (tests/support/guest): beside those of AVX2, and in the tests of the kernels.

NEON has the vectors and the order of AVX2, so results are equal bit for bit, except for products of bfloat16 with BF16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, RELU, SIGMOID, SILU
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.packing import pack_float, pack_integers
from inflight.kernels.encoder_ops import activate, layer_norm
from tests.conftest import FULL
from tests.support.guest.kernels import PROCESSORS, GuestLibrary, build, why_not
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.integer_weights import INTEGER_WEIGHTS, integer_weight

needs_avx2 = pytest.mark.skipif("avx2" not in INSTRUCTION_SETS_HERE, reason=f"no avx2 here: {INSTRUCTION_SETS_HERE}")
ROOT = Path(__file__).parents[4]
SETS = [pytest.param(name, marks=[] if name == "neon_bf16" else [pytest.mark.full]) for name in PROCESSORS]
DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = [1, 3, 6, 7, 20]  # a tile has at most six rows

OPERATIONS = "tests/unit/kernels/cpu/test_layer_ops.py"
LINEAR = "tests/unit/kernels/cpu/test_linear.py"
ATTENTION = "tests/unit/attention/test_cpu_paged.py"
SAMPLE = [
    f"{OPERATIONS}::test_infinities_and_nan_stay",
    f"{LINEAR}::test_integer_sums_are_exact",
    f"{LINEAR}::test_a_row_with_a_number_that_is_not_finite_is_nan",
]
WHOLE = [
    *(
        OPERATIONS,
        LINEAR,
        ATTENTION,
        "tests/unit/kernels/cpu/test_encoder_ops.py",
        "tests/unit/kernels/cpu/test_experts.py",
    ),
    *("tests/unit/kernels/test_short_conv.py", "tests/unit/kernels/test_gated_delta.py"),
    *("tests/unit/kernels/test_quantized_weight.py", "tests/unit/kernels/cpu/test_packing_rows.py"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds the kernels of an instruction set. Skips the test where they cannot be built or run."""

    @cache
    def built(name: str) -> Path:
        if reason := why_not(name):
            pytest.skip(reason)
        return build(name, tmp_path_factory.mktemp(name), "-O3" if FULL else "-O1")

    return built


@pytest.fixture(scope="module")
def opened(program: Callable[[str], Path]) -> Iterator[Callable[[str], GuestLibrary]]:
    libraries = dict[str, GuestLibrary]()

    def open_guest(name: str) -> GuestLibrary:
        if name not in libraries:
            libraries[name] = GuestLibrary(program(name), name)
        return libraries[name]

    yield open_guest
    for library in libraries.values():
        library.close()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_avx2
@pytest.mark.parametrize("name", SETS)
def test_products_of_integers(name: str, opened: Callable[[str], GuestLibrary]) -> None:
    for weight_of, x_dtype in product(INTEGER_WEIGHTS, DTYPES):
        weight, bias = integer_weight(*weight_of), draw(1, 70)
        here, there = (
            pack_integers(kernels, HugePages(), weight, bias, gate=None)
            for kernels in (open_kernels("avx2"), opened(name))
        )
        x = draw(3, max(NUM_ROWS), weight.shape[1]).to(x_dtype)
        x[::3, [1, weight.shape[1] - 1]] *= 50  # outliers, in some rows
        for num_rows in NUM_ROWS:
            rows = x[-num_rows:]
            assert torch.equal(there(rows, torch.float32), here(rows, torch.float32)), (weight_of, num_rows)


@needs_avx2
@pytest.mark.parametrize("name", SETS)
def test_products_of_floats(name: str, opened: Callable[[str], GuestLibrary]) -> None:
    """They are those of AVX2 bit for bit. With BF16, products of bfloat16 are rounded otherwise."""
    for dtype, gate in product(DTYPES, (None, SILU)):
        weight, bias = draw(1, 70, 100).to(dtype), draw(2, 70).to(dtype)
        here, there = (
            pack_float(kernels, HugePages(), [weight], bias, gate=gate)
            for kernels in (open_kernels("avx2"), opened(name))
        )
        x = draw(3, max(NUM_ROWS), 100).to(dtype)
        for num_rows, out_dtype in product(NUM_ROWS, DTYPES):
            mine, theirs = there(x[-num_rows:], out_dtype), here(x[-num_rows:], out_dtype)
            assert torch.equal(mine, there(x, out_dtype)[-num_rows:]), (dtype, gate, num_rows, out_dtype)
            if name == "neon_bf16" and dtype is torch.bfloat16:
                rtol = 1e-3 if out_dtype is torch.float32 else 3e-2  # neighbours in bfloat16 differ by up to 0.8 %
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-4)
            else:
                assert torch.equal(mine, theirs), (dtype, gate, num_rows, out_dtype)


@needs_avx2
@pytest.mark.parametrize("name", SETS)
def test_what_is_between_products(name: str, opened: Callable[[str], GuestLibrary]) -> None:
    def results(ops: CpuLayerOps, size: int, dtype: torch.dtype) -> list[Tensor]:
        weight, bias, delta = (draw(seed, size).to(dtype) for seed in (1, 2, 3))
        x = draw(4, 5, size).to(dtype)
        x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, 1e-42
        heads, cos, sin = (
            draw(seed, *shape).to(dtype) for seed, shape in ((5, (5, 3, size)), (6, (5, size)), (7, (5, size)))
        )
        ops.norm_and_rotate(heads, draw(8, 3, size).to(dtype), 1e-6, cos, sin)
        made = [heads, ops.rms_norm(x, weight, 1e-6), layer_norm(ops, None, x, weight, bias, 1e-6)]
        for activation in (SILU, GELU_TANH, GELU, RELU):
            made.append(x.clone())
            activate(ops, made[-1], activation)
        for activation in (SILU, GELU_TANH, SIGMOID):
            made.append(x.clone())
            ops.multiply_activation(made[-1], delta.expand(5, size).contiguous(), activation)
        return made

    for size, dtype in product((18, 64), DTYPES):
        mine, theirs = (results(CpuLayerOps(kernels), size, dtype) for kernels in (opened(name), open_kernels("avx2")))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.timeout(3600)  # for `make test-full` on a busy machine: an emulator is slow
@pytest.mark.parametrize("name", SETS)
def test_the_tests_of_the_kernels(name: str, program: Callable[[str], Path]) -> None:
    """Against float64, and each row in different batches. FULL: all of them, with the counts of `make test`."""
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", *(WHOLE if FULL else SAMPLE)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "INFLIGHT_TEST_"))}
    environment = {**kept, "INFLIGHT_TEST_GUEST": f"{name}={program(name)}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"[{name}" in done.stdout and "[avx" not in done.stdout  # the emulated processor was the one that they had
