"""`model_facts`: what `inflight show` says of a model. Loads neither torch nor weights."""

from collections import Counter
from pathlib import Path
from typing import Any

from inflight.config.architecture import INFLIGHT, ModelArchitecture
from inflight.config.experts import DenseAndMoeSpec, MoeSpec
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_mmproj import find_mmproj
from inflight.config.machine import detect_machine
from inflight.config.pooler import CLASSIFY
from inflight.config.unknown_family import describe_model
from inflight.config.weight_room import find_room, num_weights
from inflight.damaged_files import named_errors
from inflight.errors import ModelNotFoundError, TokenizerError, UnsupportedModelError
from inflight.hub import has_tag, resolve_model_folder, resolve_without_weights
from inflight.hub_cache import cached_models, size_text
from inflight.model_name import EMBEDDED, is_local
from inflight.parsers.selector import AUTO, resolve_parsers
from inflight.tokenizer.source import read_chat_template, read_tokenizer

Facts = dict[str, dict[str, Any]]  # section -> fact -> JSON value


def model_facts(model: str | None, revision: str | None = None) -> Facts:
    """
    Args:
        model: a folder, a GGUF file, a hub id, or "org/name:FILE.gguf" if that file is in the hub's cache; None is the embedded
            model. Of a hub id the small files are downloaded.

    Raises:
        ConfigError: there is no such model, or a file of it is damaged.
    """
    source = _find(model, revision)
    mmproj = find_mmproj(source, None)
    with named_errors(UnsupportedModelError, source, "its configuration"):
        config = read_model_config(source, mmproj=mmproj)
        gguf = source if source.is_file() else None
        architecture = describe_model(config, "auto", gguf=gguf, device=detect_machine("auto").device)
    return {
        "model": {"name": model or EMBEDDED, "place": str(source), **({"images": str(mmproj)} if mmproj else {})},
        "architecture": _architecture_facts(architecture),
        "weights": _weight_facts(source, architecture, mmproj),
        "text": _text_facts(source, architecture),
    }


def _find(model: str | None, revision: str | None) -> Path:
    if model is None or is_local(model) or ":" not in model:
        return resolve_without_weights(model, revision)
    # a GGUF file on the hub has its weights in it: it is not downloaded only to be shown
    repository, _, file = model.partition(":")
    names = [each.name for each in cached_models() if each.name.startswith(f"{repository}:")]
    if model not in names and not any(has_tag(name.partition(":")[2], file) for name in names):
        has = f" (it has {', '.join(names)})" if names else ""
        raise ModelNotFoundError(f"the hub's cache has no {model!r}{has}: `inflight pull {model}` downloads it")
    return resolve_model_folder(model, revision)


def _architecture_facts(architecture: ModelArchitecture) -> dict[str, Any]:
    is_own = architecture.implementation == INFLIGHT
    facts: dict[str, Any] = {
        "family": architecture.name,
        "computed by": "Inflight's own code" if is_own else f"transformers' code {architecture.not_native}".strip(),
        "layers": architecture.num_layers,
        "hidden size": architecture.hidden_size,
        "vocabulary": architecture.vocab_size,
        "longest sequence": architecture.default_max_model_len,
    }
    if is_own:
        mixers = Counter(type(layer.mixer).__name__.removesuffix("Spec") for layer in architecture.layers)
        facts["mixers"] = ", ".join(f"{count} x {kind}" for kind, count in mixers.items())
        mlps = [
            each.moe if isinstance(each, DenseAndMoeSpec) else each
            for each in (layer.mlp for layer in architecture.layers)
        ]
        if experts := [mlp for mlp in mlps if isinstance(mlp, MoeSpec)]:
            facts["experts"] = f"{experts[0].num_experts} in {len(experts)} layers, {experts[0].router.top_k} a token"
    return facts


def _weight_facts(source: Path, architecture: ModelArchitecture, mmproj: Path | None) -> dict[str, Any]:
    room = find_room(source, architecture, "auto", None, mmproj)
    count = num_weights(architecture)
    return {
        "parameters": f"about {count / 1e9:.2f} billion" if count >= 5e6 else f"about {count:,}" if count else None,
        "dtype": architecture.dtype,
        "format": "gguf" if source.is_file() else architecture.weight_format,
        "memory": None if room is None else size_text(room.num_bytes),
        "memory with int4": None if room is None or room.int4_bytes is None else size_text(room.int4_bytes),
    }


def _text_facts(source: Path, architecture: ModelArchitecture) -> dict[str, Any]:
    """What the model takes and answers."""
    takes = ["text", *(["images"] if architecture.vision is not None else [])]
    pooler = architecture.pooler
    answers = "text" if pooler is None else "classes" if pooler.task == CLASSIFY else "vectors"
    facts: dict[str, Any] = {"takes": takes, "answers": answers}
    try:
        read_tokenizer(source, None)
        template = read_chat_template(source, None, None)
    except TokenizerError as error:
        return {**facts, "tokenizer": f"cannot be read: {error}"}
    parsers = resolve_parsers(AUTO, AUTO, template)
    return {
        **facts,
        "chat template": template.default_source is not None,
        "tool calls": parsers.tool or "none",
        "reasoning": parsers.reasoning or "none",
    }
