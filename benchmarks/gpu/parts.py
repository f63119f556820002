"""The parts of the check: which command each is, in what order, and how long it may take."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# of tests/gpu, and seconds on an H100 (estimates: test_identity, test_two_ranks)
TEST_FILES = {"test_kernels": 80, "test_greedy": 100, "test_identity": 150, "test_runtime": 40, "test_two_ranks": 60}
ODD_SHAPES = (  # tests of kernels that take the GPU where there is one, and Triton's interpreter elsewhere
    "tests/unit/kernels/triton/test_elementwise.py",
    "tests/unit/kernels/triton/test_triton_linear.py",
    "tests/unit/kernels/triton/test_sampling_kernels.py",
    "tests/unit/kernels/triton/test_step_state.py",
    "tests/unit/kernels/triton/test_token_masks_kernel.py",
    "tests/unit/sample/test_device_sampler.py",
    "tests/unit/sample/test_processors_properties.py",
)
ALL_FIGURES = ("decode", "prefill", "throughput", "device_time", "graphs")

_EAGER = {"enforce_eager": True}
_SYNCHRONOUS = {"async_scheduling": False}


@dataclass(frozen=True, kw_only=True)
class Part:
    """`arguments` are those of a Python interpreter. A part that runs longer than `limit_seconds` is killed."""

    name: str
    arguments: tuple[str, ...]
    expected_seconds: float
    limit_seconds: float
    is_test: bool = False
    is_side_by_side: bool = False  # with the others that are, before all that are not


def all_parts(device: str, *, quick: bool) -> list[Part]:
    """In the order of their worth: what there is no time for is at the end."""
    options = ("--device", device, *(("--quick",) if quick else ()))

    def figures(
        name: str, model: str, engine_args: dict[str, Any], wanted: Iterable[str], seconds: float, *more: str
    ) -> Part:
        arguments = ["-m", "benchmarks.gpu.engine_figures", *options, "--model", "tiny" if device == "cpu" else model]
        arguments += ["--engine-args", json.dumps(engine_args), "--figures", *wanted, *more]
        return Part(name=name, arguments=tuple(arguments), expected_seconds=seconds, limit_seconds=max(60, 3 * seconds))

    def module(name: str, module: str, seconds: float, *more: str) -> Part:
        arguments = ("-m", f"benchmarks.gpu.{module}", *options, *more)
        return Part(name=name, arguments=arguments, expected_seconds=seconds, limit_seconds=max(60, 3 * seconds))

    found = []
    for test, seconds in TEST_FILES.items() if device == "cuda" else ():
        # test_runtime measures the GPU's free memory, which others change
        found.append(_tests(test, seconds, f"tests/gpu/{test}.py", is_side_by_side=test != "test_runtime"))
    found.append(module("ceilings", "ceilings", 5))
    found.append(figures("qwen3-0.6b", "qwen3-0.6b", {}, ALL_FIGURES, 45))
    found.append(figures("qwen3-8b", "qwen3-8b", {}, ("decode", "prefill", "device_time", "graphs"), 35))
    found.append(figures("qwen3-0.6b-synchronous", "qwen3-0.6b", _SYNCHRONOUS, ("decode", "device_time"), 35))
    eager = {} if device == "cpu" else _EAGER
    found.append(figures("qwen3-0.6b-eager", "qwen3-0.6b", eager, ("decode", "device_time"), 35))
    found.append(module("transformers", "against_transformers", 60))
    for name, engine_args in _formats(device).items():
        found.append(figures(f"qwen3-8b-{name}", "qwen3-8b", engine_args, ("decode",), 20, "--batches", "1", "64"))
    if device == "cuda":  # many small compilations of what CI has tried in the interpreter
        found.append(_tests("odd_shapes", 60, *ODD_SHAPES, is_side_by_side=False))
    found.append(module("transformers-compiled", "against_transformers", 60, "--compiled"))
    return found


def _tests(name: str, seconds: float, *paths: str, is_side_by_side: bool) -> Part:
    """Warnings are no errors there: the packages are of other versions than ours."""
    options = ("-v", "--tb=short", "-rfE", "-W", "default", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120")
    return Part(
        name=name, arguments=("-m", "pytest", *paths, *options), expected_seconds=seconds, limit_seconds=240, is_test=True,
        is_side_by_side=is_side_by_side,
    )  # fmt: skip


def _formats(device: str) -> dict[str, dict[str, Any]]:  # Any: arguments of the engine
    if device == "cpu":
        return {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
    return {"fp8": {"quantization": "fp8"}, "int4": {"quantization": "int4"}, "kv-fp8": {"kv_cache_dtype": "fp8"}}
