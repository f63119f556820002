"""The name in config.json's "architectures" -> the class that runs it."""

from __future__ import annotations

from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES
from inflight.errors import UnsupportedModelError
from inflight.models.causal_lm import CausalLM
from inflight.models.llama import LlamaForCausalLM
from inflight.models.mistral import MistralForCausalLM
from inflight.models.qwen2 import Qwen2ForCausalLM
from inflight.models.qwen3 import Qwen3ForCausalLM

_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
assert tuple(_CLASSES) == SUPPORTED_ARCHITECTURES


def get_model_class(name: str) -> type[CausalLM]:
    """
    Raises:
        UnsupportedModelError: no family of that name.
    """
    if name not in _CLASSES:
        raise UnsupportedModelError(f"{name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return _CLASSES[name]
