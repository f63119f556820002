"""`read_head`: an EAGLE head, which is given in place of a draft model. `with_head`: the configuration with it."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.eagle import describe_eagle, kind_of_head
from inflight.config.engine import EngineConfig, ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.json_fields import JsonFields
from inflight.errors import ConfigError
from inflight.hub import read_config, resolve_model_folder

Describe = Callable[[Path], ModelArchitecture]  # the network of the model in a folder


class ReadConfig(Protocol):
    """`model_files.resolve_config`."""

    def __call__(self, args: EngineArgs, describe: Describe | None = None) -> EngineConfig: ...


def kind_of_model(args: EngineArgs) -> str | None:
    """The method for which the model of `args` is a head, if its config.json says so; None if it is a whole model."""
    folder = resolve_model_folder(args.model, args.revision, with_code=args.trust_remote_code)
    return None if folder.is_file() else kind_of_head(JsonFields(read_config(folder)).name_or_names("architectures"))


def read_head(config: EngineConfig, args: EngineArgs, resolve_config: ReadConfig) -> ModelConfig:
    """
    Args:
        config: that of the engine, whose method is one of EAGLE's.
        args: those of the head alone.

    Raises:
        ConfigError: it is no such head, or one for another model.
    """
    served = config.model
    if served.architecture.implementation == TRANSFORMERS:
        raise ConfigError(
            f"speculative_config: {served.architecture.name} is computed by transformers' code, which does not show the hidden "
            "states that an EAGLE head reads; use ngram or suffix"
        )
    assert config.speculative is not None
    describe = partial(
        _describe, served=served.architecture, method=config.speculative.method, is_dummy=args.load_format == "dummy"
    )
    return resolve_config(args, describe).model


def with_head(config: EngineConfig, head: ModelConfig) -> EngineConfig:
    """The configuration with `head`, whose served model copies out the hidden states that the head reads."""
    served, spec = config.model, head.architecture.hidden_inputs
    assert spec is not None, "a whole model"
    max_model_len = min(served.max_model_len, head.architecture.max_position_embeddings)
    both = hashlib.sha256(f"{served.fingerprint} {head.fingerprint}".encode()).hexdigest()
    return replace(
        config,
        model=replace(served, fingerprint=both, architecture=replace(served.architecture, captured=spec.captured)),
        draft_model=replace(
            head,
            max_model_len=max_model_len,
            architecture=head.architecture.for_length(max_model_len),
            batch_invariant=False,
        ),
    )


def _describe(folder: Path, *, served: ModelArchitecture, method: str, is_dummy: bool) -> ModelArchitecture:
    if folder.is_file():
        raise ConfigError(
            f"speculative_config: Inflight reads EAGLE heads from safetensors, and {folder} is a GGUF file"
        )
    return describe_eagle(read_model_config(folder), folder, served, method, is_dummy=is_dummy)
