"""The families of models that Inflight computes itself. A family is one file of this folder and one entry here."""

from __future__ import annotations

from inflight.config.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    granite,
    lfm2,
    llama,
    minicpm3,
    ministral,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
    smollm3,
    youtu,
)
from inflight.config.families.family import Family

_MODULES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
    gemma2,
    gemma3,
    gemma4,
    phi3,
    olmo2,
    olmo3,
    granite,
    smollm3,
    glm,
    glm4,
    ministral,
    ministral3,
    lfm2,
    deepseek_v2,
    deepseek_v3,
    youtu,
    minicpm3,
)
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _MODULES)
