"""Reads what a front end needs from a model's folder: configuration, tokenizer and chat template, but no weights.

`LLMEngine` and `AsyncLLM` use this file to make their `InputProcessor`. Nothing here imports torch, because that takes long.
`AsyncLLM` needs no torch in its process: the engine loads the weights in another process, and `AsyncLLM` makes its input
processor meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from inflight import envs
from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import LLGUIDANCE, EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_mmproj import find_mmproj, with_mmproj_file
from inflight.config.machine import detect_machine
from inflight.config.overrides import ineffective_overrides, merge_overrides
from inflight.config.resolve import resolve
from inflight.config.resolve_pooler import POOLER_FIELDS, resolve_pooler
from inflight.config.stored_head import resolve_head
from inflight.config.unknown_family import describe_model
from inflight.damaged_files import named_errors
from inflight.engine.start.draft_model import with_chosen_method, with_draft_model
from inflight.engine.start.eagle_head import Describe
from inflight.engine.start.generation_defaults import model_eos_token_ids, warn_of_unknown_fields
from inflight.engine.start.unused_generation_fields import warn_of_unused_fields
from inflight.errors import UnsupportedModelError
from inflight.hub import read_generation_config, resolve_model_folder
from inflight.structured_output.backend import GrammarBackend
from inflight.structured_output.loader import load_backend
from inflight.structured_output.manager import StructuredOutputManager
from inflight.tokenizer.source import read_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def resolve_config(args: EngineArgs, describe: Describe | None = None) -> EngineConfig:
    """Returns the configuration for this model on this machine. Reads the model's config.json and the headers of
    its weights. If `args.model` is the id of a model on the Hugging Face hub, downloads the model. `describe`: what says how
    the network of an EAGLE head is; other models do not need it.

    Raises:
        ConfigError: the arguments are wrong, or do not fit the model or the machine.
    """
    folder = resolve_model_folder(args.model, args.revision, with_code=args.trust_remote_code)
    warn_of_unknown_fields(args.override_generation_config or {})
    if args.structured_outputs_backend not in LLGUIDANCE:
        logger.warning("structured_outputs_backend=%r: llguidance serves instead", args.structured_outputs_backend)
    machine = detect_machine(args.device)
    with named_errors(UnsupportedModelError, folder, "its configuration"):
        mmproj = find_mmproj(folder, args.mmproj, args.revision, language_model_only=args.language_model_only)
        architecture = describe(folder) if describe else _describe(args, folder, mmproj, machine.device)
        args = with_chosen_method(args, folder, architecture)
        config = resolve(
            args,
            folder=folder,
            architecture=architecture,
            machine=machine,
            timeout_seconds=envs.execute_model_timeout_seconds(),
        )
    warn_of_unused_fields(folder, architecture.vocab_size)
    return with_draft_model(with_mmproj_file(config, mmproj), args, resolve_config)


def _describe(args: EngineArgs, folder: Path, mmproj: Path | None, device: str) -> ModelArchitecture:
    """Logs what `auto` has chosen, and the names of `hf_overrides` that change nothing."""
    config = read_model_config(folder, args.max_model_len, mmproj)
    overrides = args.hf_overrides or {}
    gguf = folder if folder.is_file() else None
    describe = partial(
        describe_model,
        model_impl=args.model_impl,
        gguf=gguf,
        device=device,
        language_model_only=args.language_model_only,
    )
    architecture = describe(merge_overrides(config, args.config_overrides))
    if architecture.implementation != TRANSFORMERS and (
        names := [name for name in ineffective_overrides(config, overrides, describe) if name not in POOLER_FIELDS]
    ):
        logger.warning("hf_overrides: %s of %s changes nothing in this model", ", ".join(names), architecture.name)
    if architecture.not_native:
        logger.info(
            "transformers' code computes the model (model_impl='transformers'), because Inflight's own does not: %s",
            architecture.not_native,
        )
    if args.load_format != "dummy":
        architecture = resolve_head(architecture, folder)
    token_id = partial(_token_id, folder, args.tokenizer)
    return resolve_pooler(args, architecture, merge_overrides(config, overrides), folder, token_id)


def _token_id(folder: Path, tokenizer: str | None, token: str) -> int | None:
    """The id of a token, by its spelling in the vocabulary or by its text; None if the vocabulary has no such token."""
    found = read_tokenizer(folder, tokenizer)
    ids = found.encode(token, add_special_tokens=False)
    return found.vocabulary().get(token, ids[0] if len(ids) == 1 else None)


def make_grammars(config: EngineConfig, read: Callable[[], Tokenizer]) -> StructuredOutputManager:
    """Returns the manager that compiles grammars. `read` returns the tokenizer. The manager calls `read` when it gets the first
    request with a grammar."""
    architecture = config.model.architecture

    def create() -> GrammarBackend:
        tokenizer = read()
        generation_config = {**(read_generation_config(config.model.folder) or {}), **config.model.generation_overrides}
        eos = model_eos_token_ids(architecture, tokenizer, generation_config)
        return load_backend()(tokenizer, architecture.vocab_size, sorted(eos))

    return StructuredOutputManager(
        create,
        architecture.vocab_size,
        num_buffers=2 * config.scheduler.max_depth,
        is_paced=config.parallel.distributed_executor_backend != "external_launcher",
    )
