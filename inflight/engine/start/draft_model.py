"""`with_draft_model`: reads the model that `speculative_config` names. Can it propose tokens for the served model?"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import EngineConfig, ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.speculative import SpeculativeConfig
from inflight.config.whole_prompts import is_causal
from inflight.errors import ConfigError
from inflight.tokenizer.source import read_tokenizer


def with_draft_model(
    config: EngineConfig, args: EngineArgs, resolve_config: Callable[[EngineArgs], EngineConfig]
) -> EngineConfig:
    """Returns the configuration with the draft model that its `speculative` names; unchanged if it names none. The blocks of
    the KV cache then have the keys of both models, so the names of blocks tell both.

    Args:
        args: those of the served model.
        resolve_config: as of `model_files`.

    Raises:
        ConfigError: the draft model cannot be read, cannot propose tokens, or has another vocabulary.
    """
    speculative, served = config.speculative, config.model
    if speculative is None or speculative.model is None:
        return config
    if served.architecture.pooler is not None:
        raise ConfigError(
            f"speculative_config: {served.architecture.name} makes vectors or scores, and no tokens that a draft model could "
            "guess; leave speculative_config out"
        )
    draft = resolve_config(_arguments(config, args, speculative)).model
    _check_kind(draft)
    _check_vocabulary(served, draft, args)
    max_model_len = min(served.max_model_len, draft.architecture.max_position_embeddings)
    draft = replace(
        draft,
        max_model_len=max_model_len,
        architecture=draft.architecture.for_length(max_model_len),
        batch_invariant=False,
    )
    both = hashlib.sha256(f"{served.fingerprint} {draft.fingerprint}".encode()).hexdigest()
    return replace(config, model=replace(served, fingerprint=both), draft_model=draft)


def _arguments(config: EngineConfig, args: EngineArgs, speculative: SpeculativeConfig) -> EngineArgs:
    return EngineArgs(
        model=speculative.model,
        revision=speculative.revision,
        device=args.device,
        dtype=config.model.dtype,  # that of the keys and values
        load_format="dummy" if args.load_format == "dummy" else "auto",
        seed=args.seed,
        quantization=speculative.quantization,
        quantization_group_size=args.quantization_group_size,
        language_model_only=True,
        trust_remote_code=args.trust_remote_code,
    )


def _check_kind(draft: ModelConfig) -> None:
    architecture = draft.architecture
    problem = (
        "is computed by transformers' code"
        if architecture.implementation == TRANSFORMERS
        else "makes vectors or scores, and no tokens"
        if architecture.pooler is not None
        else "has recurrent layers, whose state cannot go back when a token that it guessed is refused"
        if architecture.recurrences
        else "sees the tokens behind each token"
        if not is_causal(architecture)
        else None
    )
    if problem is not None:
        raise ConfigError(
            f"speculative_config: the draft model {draft.folder} ({architecture.name}) {problem}; take a decoder of one of "
            "Inflight's own families, such as a smaller model of the served model's series"
        )


def _check_vocabulary(served: ModelConfig, draft: ModelConfig, args: EngineArgs) -> None:
    """Compares the tokens of both tokenizers. If one of the models has no tokenizer, it compares the sizes of the vocabularies.

    Raises:
        ConfigError: a token of the served model is another text in the draft model, or has no number there.
    """
    tokens = [_tokens(served.folder, args.tokenizer), _tokens(draft.folder, None)]
    sizes = [served.architecture.vocab_size, draft.architecture.vocab_size]
    place = f"speculative_config: the draft model {draft.folder} has another vocabulary than {served.folder}"
    advice = "take a draft model with the served model's tokenizer"
    if args.skip_tokenizer_init or not all(tokens):
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{place}: {sizes[1]} tokens, not {sizes[0]}; {advice}")
        return
    for number in sorted({*tokens[0], *tokens[1]}):
        ours, theirs = (each.get(number) for each in tokens)
        if ours != theirs:
            raise ConfigError(
                f"{place}: token {number} is {_shown(ours)} in the served model, and {_shown(theirs)} in the draft model; "
                f"{advice}"
            )
    if min(sizes) <= max(tokens[0]):
        raise ConfigError(
            f"{place}: its tokenizer has tokens up to {max(tokens[0])}, but the models have {sizes[0]} and {sizes[1]} of them; "
            f"{advice}"
        )


def _tokens(folder: Path, tokenizer: str | None) -> dict[int, str]:
    """Number -> token. Empty if the folder has no tokenizer."""
    try:
        vocabulary = read_tokenizer(folder, tokenizer).vocabulary()
    except ConfigError:
        return {}
    return {number: token for token, number in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
