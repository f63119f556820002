"""`inflight serve --check`: finds problems that would prevent the server's start. Loads neither torch nor weights."""

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import ModelConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.expert_parallel import is_in_lockstep
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_mmproj import find_mmproj
from inflight.config.kv_transfer import resolve_kv_transfer
from inflight.config.machine import Machine, detect_machine
from inflight.config.overrides import merge_overrides
from inflight.config.resolve import find_conflicts
from inflight.config.safetensors_file import check_files_exist, check_headers
from inflight.config.unknown_family import describe_model
from inflight.config.weight_room import Request, check_room, find_room, with_draft
from inflight.damaged_files import named_errors
from inflight.engine.start.generation_defaults import default_sampling_params, eos_token_ids
from inflight.entrypoints.response_store.place import check_place
from inflight.entrypoints.serve.check_drafts import resolve_drafter
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.errors import CheckpointError, ConfigError, UnsupportedModelError
from inflight.hub import can_download, read_generation_config, resolve_without_weights
from inflight.model_name import is_local
from inflight.parsers.selector import NONE, resolve_parsers
from inflight.tokenizer.source import read_chat_template, read_tokenizer


def server_problems(settings: ServerSettings) -> list[str]:
    """Returns a message for each problem with the address, the TLS files, the file of stored responses, the names of parsers,
    or missing packages. The test of the address listens there for a moment."""
    found = _problems_of(lambda: Listener(settings).close())
    found += _problems_of(lambda: make_ssl_context(settings))
    found += _problems_of(lambda: check_place(settings))
    found += _problems_of(lambda: resolve_parsers(settings.tool_call_parser, NONE, None))
    found += _problems_of(lambda: resolve_parsers(NONE, settings.reasoning_parser, None))
    if settings.otlp_traces_endpoint is not None and importlib.util.find_spec("opentelemetry") is None:
        found.append(
            "otlp_traces_endpoint needs packages that are not installed: run pip install 'inflight-llm[tracing]'"
        )
    return found


def model_problems(args: EngineArgs) -> list[str]:
    """Returns a message for each problem with the model's files, and for each argument that does not fit the model, the
    machine or another argument."""
    try:
        source = resolve_without_weights(args.model, args.revision)
    except ConfigError as error:
        # The model's folder is unknown, but a tokenizer that --tokenizer names can be checked without it.
        own = [] if args.tokenizer is None else _tokenizer_problems(args, Path())
        return [str(error), *own]
    found = _tokenizer_problems(args, source)
    found += _problems_of(lambda: _check_generation_config(args, source))
    found += _problems_of(lambda: _check_weight_files(args, source))
    try:
        machine = detect_machine(args.device)  # raises ConfigError if an environment variable is wrong
        with named_errors(UnsupportedModelError, source, "its configuration"):
            mmproj = find_mmproj(source, args.mmproj, args.revision, language_model_only=args.language_model_only)
            config = merge_overrides(read_model_config(source, args.max_model_len, mmproj), args.config_overrides)
            gguf = source if source.is_file() else None
            architecture = describe_model(
                config, args.model_impl, gguf=gguf, device=machine.device, language_model_only=args.language_model_only
            )
        with named_errors(UnsupportedModelError, source, "its configuration"):
            found += find_conflicts(args, folder=source, architecture=architecture, machine=machine)
            draft: ModelConfig | None = None
            try:
                draft = resolve_drafter(args, source, is_valid=not found)
            except ConfigError as error:
                found.append(str(error))
            return found + _problems_of(lambda: _check_room(args, source, mmproj, architecture, machine, draft))
    except ConfigError as error:
        return [*found, str(error)]


def _check_room(
    args: EngineArgs,
    source: Path,
    mmproj: Path | None,
    architecture: ModelArchitecture,
    machine: Machine,
    draft: ModelConfig | None = None,
) -> None:
    """Raises OutOfMemoryError if weights, KV caches and host pools do not fit into the memory. Reads the headers of the
    weights. `draft`: the model, layer or head that writes drafts."""
    quantization = args.quantization if args.quantization in ("int4", "int8", "fp8") else None
    room = None if args.load_format == "dummy" else find_room(source, architecture, args.dtype, quantization, mmproj)
    if room is not None and args.nnodes == 1:
        num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        host_pool_bytes = 0
        with suppress(ConfigError):  # `find_conflicts` has reported it
            transfer = resolve_kv_transfer(args)
            host_pool_bytes = 0 if transfer is None else transfer.cpu_bytes
        room = room._replace(num_ranks=num_ranks, num_replicas=len(args.replicas), host_pool_bytes=host_pool_bytes)
        if is_in_lockstep(args):
            room = room._replace(num_expert_copies=1)
        dtype = architecture.dtype if args.dtype == "auto" else args.dtype
        request = Request(
            architecture,
            args.max_model_len or architecture.default_max_model_len,
            dtype,
            dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        )
        room = room._replace(kv_cache_bytes=args.kv_cache_memory_bytes or 0)
        if draft is not None:
            room = with_draft(room, draft)
        check_room(room, machine, request)


def _check_generation_config(args: EngineArgs, source: Path) -> None:
    overrides = args.override_generation_config or {}
    merged = {**((read_generation_config(source) if source.is_dir() else None) or {}), **overrides}
    default_sampling_params(merged if args.generation_config == "auto" else overrides)
    eos_token_ids(merged)


def _check_weight_files(args: EngineArgs, source: Path) -> None:
    """Raises ConfigError if a weight file is missing, or if its header is damaged. The weights themselves are not read. Files
    of a hub id may be missing if the hub can be reached: the start downloads them."""
    if args.load_format == "dummy" or source.is_file():
        return
    try:
        check_files_exist(source, all_of_index=True)
    except CheckpointError as error:
        if args.model is None or is_local(args.model):
            raise CheckpointError(f"{error}; load_format='dummy' makes random ones") from error
        if not can_download(args.model, args.revision):
            raise CheckpointError(f"{error}; and the hub cannot be reached") from error
        return
    check_headers(source)


def _tokenizer_problems(args: EngineArgs, source: Path) -> list[str]:
    if args.skip_tokenizer_init:
        return []
    found = _problems_of(lambda: read_tokenizer(source, args.tokenizer))
    return found + _problems_of(lambda: read_chat_template(source, args.tokenizer, args.chat_template))


def _problems_of(part: Callable[[], object]) -> list[str]:
    try:
        part()
    except ConfigError as error:
        return [str(error)]
    return []
