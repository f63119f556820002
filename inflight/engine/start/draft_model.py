"""`with_draft_model`: reads the model that `speculative_config` names, or the served model's own layer for drafts."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.engine import EngineConfig, ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_parts import read_gguf
from inflight.config.hidden_inputs import HiddenInputsSpec
from inflight.config.safetensors_file import find_files, model_name, read_header
from inflight.config.speculative import AUTO, DRAFT_MODEL, EAGLE, EAGLE3, MTP, SpeculativeConfig
from inflight.config.whole_prompts import is_causal
from inflight.engine.start.eagle_head import ReadConfig, kind_of_model, read_head, with_head
from inflight.errors import ConfigError
from inflight.tokenizer.source import read_tokenizer

logger = logging.getLogger(__name__)


def with_draft_model(config: EngineConfig, args: EngineArgs, resolve_config: ReadConfig) -> EngineConfig:
    """Returns the configuration with the draft model that its `speculative` names; unchanged if it names none. With MTP, it is
    a layer of the served model's checkpoint, with EAGLE a layer in a folder of its own. The blocks of the KV cache then have
    the keys of both models, so the names of blocks tell both.

    Args:
        args: those of the served model.
        resolve_config: as of `model_files`.

    Raises:
        ConfigError: the draft model cannot be read, cannot propose tokens, or has another vocabulary.
    """
    speculative, served = config.speculative, config.model
    if speculative is None or speculative.method not in (DRAFT_MODEL, EAGLE, EAGLE3, MTP):
        return config
    if served.architecture.pooler is not None:
        raise ConfigError(
            f"speculative_config: {served.architecture.name} makes vectors or scores, and no tokens that a draft model could "
            "guess; leave speculative_config out"
        )
    if speculative.method == MTP:
        return _with_mtp(config)
    arguments = _arguments(config, args, speculative)
    kind = kind_of_model(arguments) if speculative.method == DRAFT_MODEL else speculative.method
    if kind is not None:
        config = replace(config, speculative=replace(speculative, method=kind))
        return with_head(config, read_head(config, arguments, resolve_config))
    draft = resolve_config(arguments).model
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


def with_chosen_method(args: EngineArgs, folder: Path, architecture: ModelArchitecture) -> EngineArgs:
    """Returns the arguments with a method in place of `auto`: MTP if the checkpoint in `folder` has its layer, otherwise none.
    Whether its drafts pay is found out for each request while it runs. Logs what was chosen."""
    given = args.speculative_config
    if not isinstance(given, Mapping) or given.get("method") != AUTO:
        return args
    problem = _mtp_problem(folder, architecture, args.load_format)
    if problem:
        logger.info("speculative_config: method=%r makes no drafts, because %s", AUTO, problem)
        return replace(args, speculative_config=None)
    logger.info(
        "speculative_config: method=%r is %r, because the checkpoint has a layer that predicts drafts", AUTO, MTP
    )
    return replace(args, speculative_config={**given, "method": MTP})


def _mtp_problem(folder: Path, model: ModelArchitecture, load_format: str) -> str:
    """Why there can be no MTP; "" if there can."""
    if model.implementation == TRANSFORMERS:
        return f"{model.name} is computed by transformers' code, without such a layer"
    if model.mtp is None:
        return f"{model.name} is a family without such a layer, as far as Inflight knows"
    return "" if load_format == "dummy" else _missing_mtp(folder, model, model.mtp)


def _with_mtp(config: EngineConfig) -> EngineConfig:
    """
    Raises:
        ConfigError: the family has no MTP layer, or the checkpoint does not have its weights.
    """
    served = config.model
    model = served.architecture
    problem = _mtp_problem(served.folder, model, served.load_format)
    if problem:
        raise ConfigError(
            f"speculative_config: method={MTP!r} needs a layer of the checkpoint that predicts drafts, but {problem}; use "
            "ngram, suffix or draft_model"
        )
    layer = next(layer for layer in reversed(model.layers) if layer.attention is not None)
    drafting = replace(model, layers=(layer,), vision=None, mtp=None, hidden_inputs=model.mtp, unread=("",))
    fingerprint = hashlib.sha256(f"{served.fingerprint} {MTP}".encode()).hexdigest()
    return replace(
        config,
        model=replace(served, fingerprint=fingerprint),
        draft_model=replace(served, architecture=drafting, batch_invariant=False),
    )


def _missing_mtp(folder: Path, model: ModelArchitecture, spec: HiddenInputsSpec) -> str:
    """What is missing in the checkpoint; "" if the layer is there."""
    if folder.is_file():
        names = {_name_in_folder(name) for name in read_gguf(folder).tensors}
    else:
        names = {model_name(name, model.renames) for file in find_files(folder)[0] for name in read_header(file)}
    missing = [part for part in spec.parts if not any(name.startswith(f"{part}.") for name in names)]
    if not missing:
        return ""
    found = [part for part in spec.parts if part not in missing]
    others = f"only {', '.join(found)} of it" if found else "nothing of it"
    return f"the {len(names)} tensors of {folder} have {others}: {', '.join(missing)} are missing"


def _name_in_folder(name: str) -> str:
    """Of a tensor of a GGUF file, as far as it is one of `HiddenInputsSpec.parts`."""
    for ours, theirs in (("model.layers.", "blk."), ("shared_head.norm", "nextn.shared_head_norm"), ("", "nextn.")):
        name = name.replace(theirs, ours)
    return name


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
        "reads the keys and values of the served model, and Inflight does not compute such a drafter"
        if architecture.name.endswith("AssistantForCausalLM")
        else "is computed by transformers' code"
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
