"""The parts of the check: which command each is, in what order, and how long it may take."""

from __future__ import annotations

import json
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


COMMANDS = {"faults": 280.0, "speed": 400.0, "all": 840.0}  # and their seconds


def parts_of(command: str, device: str, *, quick: bool) -> list[Part]:
    """In the order of their worth: what there is no time for is at the end."""
    faults, speed = _faults(device, quick=quick), _speed(device, quick=quick)
    options = _options(device, quick=quick)
    against = [
        _module("transformers", "against_transformers", 60, *options),
        _module("transformers-compiled", "against_transformers", 60, *options, "--compiled"),
    ]
    return {"faults": faults, "speed": speed, "all": [*faults, *speed, *against]}[command]


def _faults(device: str, *, quick: bool) -> list[Part]:
    """First what no test has run on a GPU; the tests repeat what has passed before."""
    seconds = {"mixture": 45, "nccl": 15, "recovery": 20, "kv-tiers": 25, "files": 40}
    found = [_module(name, "faults", each, *_options(device, quick=quick), name) for name, each in seconds.items()]
    if device == "cuda":
        found += [_tests(test, each, f"tests/gpu/{test}.py") for test, each in TEST_FILES.items()]
        found.append(
            _tests("odd_shapes", 60, *ODD_SHAPES)
        )  # many small compilations of what CI tries in the interpreter
    return found


def _speed(device: str, *, quick: bool) -> list[Part]:
    def figures(name: str, model: str, engine_args: dict[str, Any], wanted: str, seconds: float, *more: str) -> Part:
        arguments = ["--model", "tiny" if device == "cpu" else model, "--engine-args", json.dumps(engine_args)]
        arguments += ["--figures", *wanted.split(), *more]
        return _module(name, "engine_figures", seconds, *_options(device, quick=quick), *arguments)

    batches = ("--batches", "1", "4") if device == "cpu" else ("--batches", "1", "64", "128", "256")
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    found = [
        _module("ceilings", "ceilings", 5, *_options(device, quick=quick)),
        figures("qwen3-8b", "qwen3-8b", {}, "graphs decode prefill device_time", 60),
        figures("qwen3-8b-long", "qwen3-8b", {}, "long", 60),
    ]
    for name, engine_args in _formats(device).items():
        found.append(figures(f"qwen3-8b-{name}", "qwen3-8b", engine_args, "decode", 25, *batches))
    found.append(figures("qwen3-8b-drafts", "qwen3-8b", drafts, "decode", 20, "--batches", "1"))
    found.append(figures("qwen3-0.6b", "qwen3-0.6b", {}, " ".join(ALL_FIGURES), 45))
    found.append(figures("qwen3-0.6b-synchronous", "qwen3-0.6b", _SYNCHRONOUS, "decode device_time", 35))
    eager = {} if device == "cpu" else _EAGER
    found.append(figures("qwen3-0.6b-eager", "qwen3-0.6b", eager, "decode device_time", 35))
    return found


def _options(device: str, *, quick: bool) -> tuple[str, ...]:
    return ("--device", device, *(("--quick",) if quick else ()))


def _module(name: str, module: str, seconds: float, *arguments: str) -> Part:
    command = ("-m", f"benchmarks.gpu.{module}", *arguments)
    return Part(name=name, arguments=command, expected_seconds=seconds, limit_seconds=max(60, 3 * seconds))


def _tests(name: str, seconds: float, *paths: str) -> Part:
    """Warnings are no errors there: the packages are of other versions than ours."""
    options = ("-v", "--tb=short", "-rfE", "-W", "default", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120")
    command = ("-m", "pytest", *paths, *options)
    return Part(name=name, arguments=command, expected_seconds=seconds, limit_seconds=240, is_test=True)


def _formats(device: str) -> dict[str, dict[str, Any]]:  # Any: arguments of the engine
    if device == "cpu":
        return {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
    return {"fp8": {"quantization": "fp8"}, "int4": {"quantization": "int4"}, "kv-fp8": {"kv_cache_dtype": "fp8"}}
