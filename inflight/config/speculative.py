"""`SpeculativeConfig`: how drafts (guesses of the next tokens) are made, as vLLM's option --speculative-config names it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.config.json_option import from_json
from inflight.errors import ConfigError
from inflight.setting import setting

logger = logging.getLogger(__name__)

DRAFT_MODEL = "draft_model"
EAGLE = "eagle"
EAGLE3 = "eagle3"
MTP = "mtp"
AUTO = "auto"  # replaced as soon as the checkpoint is known
# vLLM has a method for each family. All of them are MTP.
_MTP_NAMES = frozenset(
    f"{family}_mtp"
    for family in (
        *(
            "deepseek",
            "ernie",
            "exaone4_5",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_ocr",
            "longcat_flash",
            "mimo",
        ),
        *("mimo_v2", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "step3p5"),
    )
)
# Fields of vLLM's that are about its own code, or that the measured lengths of drafts make unnecessary
FOREIGN_FIELDS = frozenset(
    (
        *("attention_backend", "code_revision", "disable_by_batch_size", "disable_logprobs", "disable_mqa_scorer"),
        *("disable_padded_drafter_batch", "draft_load_config", "enable_chunked_prefill", "enforce_eager"),
        *("max_model_len", "moe_backend", "parallel_drafting", "rejection_sample_method", "use_local_argmax_reduction"),
    )
)
_DRAFT_MODEL_FIELDS = ("model", "revision", "quantization", "draft_tensor_parallel_size")
# method -> its fields, which only some methods have
METHOD_FIELDS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    DRAFT_MODEL: _DRAFT_MODEL_FIELDS,
    EAGLE: _DRAFT_MODEL_FIELDS,
    EAGLE3: _DRAFT_MODEL_FIELDS,
    MTP: (),
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Each step proposes up to `num_speculative_tokens` tokens, and the next step verifies them.

    "ngram" looks for the last earlier occurrence of the sequence's last n tokens, and proposes the tokens that followed it.
    It uses the largest n of [`prompt_lookup_min`, `prompt_lookup_max`] for which there is such an occurrence.
    "suffix" looks for the longest occurrences of the last tokens, in the sequence and in the outputs of the
    `suffix_decoding_max_cached_requests` requests that began last (0: in the sequence only). After a match of m tokens it
    proposes at most m * `suffix_decoding_max_spec_factor` tokens, the ones that followed most often, while their probability
    by these counts is at least `suffix_decoding_min_token_prob`. A match and its drafts have at most
    `suffix_decoding_max_tree_depth` tokens together.
    "draft_model" asks a small model with the same vocabulary.
    "eagle" and "eagle3" ask a layer that was trained for the served model, and reads its hidden states. It has a folder of its
    own.
    "mtp" asks a layer of the served model's own checkpoint, which reads the hidden states of the served model.
    "auto" is "mtp" if the checkpoint has such a layer. Otherwise there are no drafts.

    Attributes:
        model: folder, GGUF file or hub id of the draft model, or folder or hub id of the EAGLE head.
        revision: branch, tag or commit of the draft model on the hub.
        quantization: as the option `quantization`, for the draft model. Its weights stay as they are stored if it is left out.
        draft_tensor_parallel_size: how many ranks share the draft model. It is computed by the rank that draws tokens.
    """

    method: str = setting("ngram", "How tokens are proposed.", choices=(*METHOD_FIELDS, AUTO))
    num_speculative_tokens: int = setting(4, "Most tokens to propose in a step.", bounds=(1, 64))
    prompt_lookup_min: int = setting(2, "Smallest n.", bounds=(1, 32))
    prompt_lookup_max: int = setting(4, "Largest n.", bounds=(1, 32))
    suffix_decoding_max_tree_depth: int = setting(24, "Most tokens of a match and its drafts.", bounds=(3, 64))
    suffix_decoding_max_cached_requests: int = setting(
        10_000, "Requests whose outputs are kept.", bounds=(0, 2**31 - 1)
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, "Most drafts for each token of a match.", bounds=(0, 64), excludes_low=True
    )
    suffix_decoding_min_token_prob: float = setting(0.1, "Smallest probability of a draft.", bounds=(0, 1))
    model: str | None = setting(None, "The draft model.")
    revision: str | None = setting(None, "Revision of the draft model on the hub.")
    quantization: str | None = setting(None, "Quantization of the draft model.")
    draft_tensor_parallel_size: int = setting(1, "Ranks that share the draft model.", choices=(1,))


def resolve_speculative(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:  # Any: checked here
    """`EngineArgs.speculative_config`, checked and completed with defaults. Fields that only vLLM has are told and left out.

    Raises:
        ConfigError: an unknown method or key, a key of another method, or a number out of bounds.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = _without_foreign_fields(given)
    config = from_json(SpeculativeConfig, "speculative_config", given, needed="method")
    for name in dict.fromkeys(name for names in METHOD_FIELDS.values() for name in names):
        methods = [method for method, names in METHOD_FIELDS.items() if name in names]
        if given.get(name) is not None and config.method not in methods:
            raise ConfigError(
                f"speculative_config: {name} is for method={' or '.join(map(repr, methods))}, but method={config.method!r} is "
                f"given; leave {name} out, or change the method"
            )
    if config.model is None and config.method in (DRAFT_MODEL, EAGLE, EAGLE3):
        raise ConfigError(
            f"speculative_config: the method {config.method} needs a `model`, the folder or hub id of "
            f"{'the draft model' if config.method == DRAFT_MODEL else 'the EAGLE head'}; give one"
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


def _without_foreign_fields(given: Mapping[str, Any]) -> dict[str, Any]:  # Any: as in `resolve_speculative`
    """As in vLLM, a `model` without a method is a draft model, and a family's own name of MTP is MTP."""
    if ignored := [name for name in given if name in FOREIGN_FIELDS]:
        logger.warning("speculative_config: %s has no meaning here, and is ignored", ", ".join(ignored))
    method = {"method": DRAFT_MODEL} if given.get("model") is not None and given.get("method") is None else {}
    if given.get("method") in _MTP_NAMES:
        method = {"method": MTP}
    return {name: value for name, value in given.items() if name not in FOREIGN_FIELDS} | method
