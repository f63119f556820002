"""Inflight: a small, asynchronous LLM inference and serving engine.

The public API is imported lazily (PEP 562): `import inflight` loads neither torch nor any other heavy package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.entrypoints.llm import LLM
    from inflight.errors import ConfigError, EngineError, InflightError, InvalidRequestError
    from inflight.outputs import CompletionOutput, Logprob, RequestOutput
    from inflight.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "inflight.entrypoints.llm",
    "SamplingParams": "inflight.sampling_params",
    "StructuredOutputsParams": "inflight.sampling_params",
    "RequestOutput": "inflight.outputs",
    "CompletionOutput": "inflight.outputs",
    "Logprob": "inflight.outputs",
    "InflightError": "inflight.errors",
    "ConfigError": "inflight.errors",
    "InvalidRequestError": "inflight.errors",
    "EngineError": "inflight.errors",
}

__all__ = [  # noqa: RUF022 - resolved by __getattr__, in the order of use
    "LLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
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
