"""What would prevent a start with drafts made by a model: its folder, its tokenizer, and the headers of its weights."""

from dataclasses import replace
from pathlib import Path

from inflight.config.engine import ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.safetensors_file import check_files_exist, check_headers
from inflight.config.speculative import AUTO, MTP, resolve_speculative
from inflight.engine.start.model_files import resolve_config
from inflight.errors import CheckpointError, ConfigError
from inflight.hub import can_download, resolve_without_weights


def resolve_drafter(args: EngineArgs, source: Path, *, is_valid: bool) -> ModelConfig | None:
    """Returns the draft model, EAGLE head or MTP layer that `speculative_config` names; None if it names none, or if it can
    only be checked when its files have been downloaded.

    Args:
        source: folder or GGUF file of the served model.
        is_valid: the served model has no problems. Otherwise nothing is compared with it.

    Raises:
        ConfigError: its files are missing or damaged, or it does not fit the served model.
    """
    try:
        speculative = resolve_speculative(args.speculative_config)
    except ConfigError:
        return None  # it is one of the conflicts of the arguments
    if speculative is None:
        return None
    given = dict(args.speculative_config or {})
    if speculative.model is not None:
        folder = resolve_without_weights(speculative.model, speculative.revision)
        is_dummy = args.load_format == "dummy"
        if not is_dummy and not _has_weights(folder, speculative.model, speculative.revision):
            return None
        given["model"] = str(folder)
        given.pop("revision", None)
    elif speculative.method not in (MTP, AUTO):
        return None
    if not is_valid or not _is_whole(args, source):
        return None
    return resolve_config(replace(args, model=str(source), revision=None, speculative_config=given)).draft_model


def _is_whole(args: EngineArgs, source: Path) -> bool:
    """Whether the files of the served model are here. Those of a hub id may be missing."""
    if args.load_format == "dummy" or source.is_file():
        return True
    try:
        check_files_exist(source, all_of_index=True)
    except CheckpointError:
        return False
    return True


def _has_weights(folder: Path, model: str, revision: str | None) -> bool:
    """
    Raises:
        CheckpointError: a file of the draft model is missing or damaged, and cannot be downloaded.
    """
    if folder.is_file():
        return True
    try:
        check_files_exist(folder, all_of_index=True)
    except CheckpointError as error:
        if Path(model).expanduser().exists():
            raise CheckpointError(f"speculative_config: {error}") from error
        if not can_download(model, revision):
            raise CheckpointError(f"speculative_config: {error}; and the hub cannot be reached") from error
        return False
    check_headers(folder)
    return True
