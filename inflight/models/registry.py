"""`get_model_class`: maps the name in "architectures" of config.json to the class that runs the model."""

from __future__ import annotations

from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES
from inflight.errors import UnsupportedModelError
from inflight.models.causal_lm import CausalLM
from inflight.models.llama import LlamaForCausalLM

# The other families differ from Llama by fields of `ModelArchitecture` only.
_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,  # the first release has a sliding window (arXiv:2310.06825)
    "Qwen2ForCausalLM": LlamaForCausalLM,  # biases on queries, keys and values; windows in upper layers (arXiv:2407.10671)
    "Qwen3ForCausalLM": LlamaForCausalLM,  # no biases, a norm on every query and key head (arXiv:2505.09388)
}
assert tuple(_CLASSES) == SUPPORTED_ARCHITECTURES


def get_model_class(name: str) -> type[CausalLM]:
    """Returns the model class for an architecture name.

    Raises:
        UnsupportedModelError: the name is not one of the supported architectures.
    """
    if name not in _CLASSES:
        raise UnsupportedModelError(f"{name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return _CLASSES[name]
