"""The formats whose accuracy is measured, as arguments of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """`max_points_lost`: of the embedded model's answers, in percentage points against bf16."""

    engine_args: dict[str, Any]  # Any: as `LLM` takes them
    max_points_lost: float


FORMATS = {
    "bf16": Format({}, 0.0),
    "int8": Format({"quantization": "int8"}, 1.0),
    "int4-g32": Format({"quantization": "int4", "quantization_group_size": 32}, 3.0),
    "int4": Format({"quantization": "int4"}, 3.0),
    "int4-head4": Format({"quantization": "int4", "head_quantization": "int4"}, 3.0),
    "int4-g128": Format({"quantization": "int4", "quantization_group_size": 128}, 3.0),
    "bf16-kv8": Format({"kv_cache_dtype": "int8"}, 1.0),
    "int8-kv8": Format({"quantization": "int8", "kv_cache_dtype": "int8"}, 1.0),
}
