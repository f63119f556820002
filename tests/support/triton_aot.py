"""Compiles Triton kernels for GPUs that are not here, and tells what the code takes of them: registers, stack, shared memory.

A process of its own, because in that of the tests kernels are made for the interpreter: `resources` starts it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # of one block, by compute capability
CUOBJDUMP = "backends/nvidia/bin/cuobjdump"  # of the package triton


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """`kernel`: "inflight.kernels.triton.layer_ops:rms_norm_kernel". `signature`: each argument's type: "*bf16", "i32", "fp32",
    or "constexpr" with its value in `constants`. `aligned`: arguments that are divisible by 16, as the launcher would find."""

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    compute_capability: int = 90
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    aligned: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Resources:
    """`stack_bytes` more than 0 are registers that were spilled."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    has_tensor_cores: bool


_FOUND: dict[str, Resources] = {}  # by the case as JSON


def resources(cases: Sequence[KernelCase]) -> list[Resources]:
    """What each case takes. All that were not asked for before are compiled in one process, each once: starting it takes as
    long as compiling two kernels. Raises AssertionError, with the compiler's output, if one does not compile."""
    keys = [json.dumps(asdict(case), sort_keys=True) for case in cases]
    new = {key: case for key, case in zip(keys, cases, strict=True) if key not in _FOUND}
    if new:
        _FOUND.update(zip(new, _compile_all(list(new.values())), strict=True))
    return [_FOUND[key] for key in keys]


def _compile_all(cases: Sequence[KernelCase]) -> list[Resources]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_aot"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300 * len(cases),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Resources(**entry) for entry in json.loads(done.stdout)]


def _compile(case: KernelCase, folder: Path) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "fn", function) if type(function).__name__ == "Autotuner" else function
    names = list(case.signature)
    source = ASTSource(
        fn=function,
        signature=dict(case.signature),
        constexprs=dict(case.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", case.compute_capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg},
    )
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / CUOBJDUMP
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    counts = {found[1]: int(found[2]) for found in re.finditer(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        registers=counts["REG"],
        stack_bytes=counts["STACK"] + counts["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        has_tensor_cores=re.search(r"\b(wgmma|mma)\.", compiled.asm["ptx"]) is not None,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = [_compile(KernelCase(**case), Path(scratch)) for case in json.load(sys.stdin)]
    print(json.dumps([asdict(entry) for entry in found]))
