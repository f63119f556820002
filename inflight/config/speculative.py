"""`SpeculativeConfig`: how drafts (guessed tokens) are proposed, for `--speculative-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.config.json_option import from_json
from inflight.errors import ConfigError
from inflight.setting import setting

DRAFT_MODEL = "draft_model"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Each step proposes up to `num_speculative_tokens` tokens, and the next step verifies them.

    "ngram" looks for the last earlier occurrence of the sequence's last n tokens, and proposes the tokens that followed it.
    It uses the largest n of [`prompt_lookup_min`, `prompt_lookup_max`] for which there is such an occurrence.
    "draft_model" asks a small model with the same vocabulary.

    Attributes:
        model: folder, GGUF file or hub id of the draft model.
        revision: branch, tag or commit of the draft model on the hub.
        quantization: as the option `quantization`, for the draft model. Its weights stay as they are stored if it is left out.
        draft_tensor_parallel_size: how many ranks share the draft model. It is computed by the rank that draws tokens.
    """

    method: str = setting("ngram", "How tokens are proposed.", choices=("ngram", "draft_model"))
    num_speculative_tokens: int = setting(4, "Most tokens to propose in a step.", bounds=(1, 64))
    prompt_lookup_min: int = setting(2, "Smallest n.", bounds=(1, 32))
    prompt_lookup_max: int = setting(4, "Largest n.", bounds=(1, 32))
    model: str | None = setting(None, "The draft model.")
    revision: str | None = setting(None, "Revision of the draft model on the hub.")
    quantization: str | None = setting(None, "Quantization of the draft model.")
    draft_tensor_parallel_size: int = setting(1, "Ranks that share the draft model.", choices=(1,))


def resolve_speculative(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:  # Any: checked here
    """`EngineArgs.speculative_config`, checked and completed with defaults.

    Raises:
        ConfigError: an unknown method or key, or a number out of bounds.
    """
    if given is None:
        return None
    config = from_json(SpeculativeConfig, "speculative_config", given, needed="method")
    if (config.model is None) == (config.method == DRAFT_MODEL):
        raise ConfigError(
            "speculative_config: the method draft_model needs a `model`, the folder or hub id of the draft model; give one"
            if config.model is None
            else f"speculative_config: model={config.model!r} is for the method draft_model, and the method is "
            f"{config.method!r}; set method to draft_model, or leave model out"
        )
    low = config.prompt_lookup_min
    high = config.prompt_lookup_max
    if low > high and "prompt_lookup_min" not in given:
        return replace(config, prompt_lookup_min=high)
    if low > high and "prompt_lookup_max" not in given:
        return replace(config, prompt_lookup_max=low)
    if low > high:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={low} is more than prompt_lookup_max={high}; lower the first or raise the "
            "second"
        )
    return config
