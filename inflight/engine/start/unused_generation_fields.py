"""`warn_of_unused_fields`: tells which fields of generation_config.json have no effect here, though others use them."""

import logging
from collections.abc import Mapping
from pathlib import Path

from inflight.hub import read_generation_config

logger = logging.getLogger(__name__)

# From transformers' GenerationConfig: the fields that change which tokens are drawn, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "diversity_penalty", "guidance_scale", "encoder_repetition_penalty"), (0, 1)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings", "sequence_bias"), ([], {})
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "penalty_alpha", "top_h", "max_time"), ()),
}


def warn_of_unused_fields(folder: Path, vocab_size: int) -> None:
    """Log the fields that have a value which is not used, and end tokens that the model does not have.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = read_generation_config(folder) or {}
    file = folder / "generation_config.json"
    unused = [
        f"{name}={str(given[name])[:60]}"
        for name, neutral in _NEUTRAL.items()
        if given.get(name) is not None and given[name] not in neutral
    ]
    if unused:
        logger.warning(
            "%s: these fields have no effect: %s; requests can set parameters of docs/sampling.md instead",
            file,
            ", ".join(unused),
        )
    ends = given.get("eos_token_id")
    unknown = [
        each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int) and each >= vocab_size
    ]
    if unknown:
        logger.warning(
            "%s: eos_token_id=%r names tokens that the model does not have (its vocab_size is %d); they are left out",
            file,
            ends,
            vocab_size,
        )
