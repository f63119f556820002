"""Inflight: a small, asynchronous LLM inference and serving engine.

The public API is imported lazily (PEP 562): `import inflight` loads neither torch nor any other heavy package. The import sets
the environment variable GOMP_SPINCOUNT, unless this variable or OMP_WAIT_POLICY is set: see docs/cpu-kernels.md.
"""

import importlib
import os
from typing import TYPE_CHECKING

from inflight.version import __version__ as __version__

if TYPE_CHECKING:
    from inflight.engine.serving.async_llm import AsyncLLM
    from inflight.entrypoints.llm import LLM
    from inflight.entrypoints.pooling_outputs import PoolingRequestOutput
    from inflight.errors import ConfigError, EngineError, InflightError, InvalidRequestError
    from inflight.outputs import CompletionOutput, Logprob, RequestOutput
    from inflight.pooling_params import PoolingParams
    from inflight.sampling_params import SamplingParams
    from inflight.structured_outputs_params import StructuredOutputsParams


# How long an idle compute thread spins before it sleeps. 20,000 rounds take half a millisecond. libgomp's default of 300,000
# rounds takes 8 ms, and a thread that spins keeps its core from other work. libgomp reads the variable when torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_NAMES = {
    "inflight.entrypoints.llm": ("LLM",),
    "inflight.engine.serving.async_llm": ("AsyncLLM",),
    "inflight.sampling_params": ("SamplingParams",),
    "inflight.structured_outputs_params": ("StructuredOutputsParams",),
    "inflight.pooling_params": ("PoolingParams",),
    "inflight.outputs": ("RequestOutput", "CompletionOutput", "Logprob"),
    "inflight.entrypoints.pooling_outputs": ("PoolingRequestOutput",),
    "inflight.errors": ("InflightError", "ConfigError", "InvalidRequestError", "EngineError"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [  # noqa: RUF022 - resolved by __getattr__, in the order of use
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "PoolingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "PoolingRequestOutput",
    "CompletionOutput",
    "Logprob",
    "InflightError",
    "ConfigError",
    "InvalidRequestError",
    "EngineError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
