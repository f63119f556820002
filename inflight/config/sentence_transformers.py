"""`read_modules`: the modules of a folder of sentence-transformers as a `PoolerSpec`. An unknown module is refused.
`read_logit_score`: those of a reranker that scores with the logits of tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.config.json_fields import JsonFields
from inflight.config.pooler import (
    CLS,
    EMBED,
    IDENTITY,
    LAST,
    LOG1P_LOG1P_RELU,
    LOG1P_RELU,
    MAX,
    MEAN,
    NORMALIZE,
    SIGMOID,
    SOFTMAX,
    DenseSpec,
    PoolerSpec,
)
from inflight.errors import UnsupportedModelError
from inflight.hub import read_json

MODULES = "modules.json"
_MODEL_FIELDS = "config_sentence_transformers.json"
_BEGINNINGS = {("Transformer", "Pooling"), ("MLMTransformer", "SpladePooling"), ("Transformer", "SpladePooling")}
_OF_TEXT = "sentence_embedding"  # the library's name of a text's vector
_WEIGHTS = "model.safetensors"
_LIBRARY = "sentence_transformers."  # how the types of the library's own modules begin
_MODES = {"cls": CLS, "lasttoken": LAST, "mean": MEAN, "max": MAX}
# the older form of a pooling's config.json: a field that is true -> the mode
_OLDER_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {"Identity": IDENTITY, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_OF_SCORES = {"Identity": IDENTITY, "Sigmoid": SIGMOID, "Softmax": SOFTMAX}


@dataclass(frozen=True, kw_only=True)
class LogitScore:
    """A reranker whose score is the logit of `true_token`, less that of `false_token`, if there is one. `activation`: "" if the
    files do not say it. The other attributes are as in `PoolerSpec`."""

    true_token: int
    false_token: int | None
    activation: str
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str
    max_length: int | None
    template_variables: tuple[tuple[str, bool | int | str], ...]


def has_modules(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def read_logit_score(folder: Path) -> LogitScore | None:
    """None if the folder has no module LogitScore.

    Raises:
        UnsupportedModelError: there are other modules beside it, or a setting is not supported.
    """
    modules = _modules(folder) if has_modules(folder) else []
    path = next((path for kind, path in modules if kind == "LogitScore"), None)
    if path is None:
        return None
    if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
        raise UnsupportedModelError(
            f"{folder / MODULES}: beside LogitScore only Transformer is supported, and the folder has "
            f"{', '.join(kind for kind, _ in modules)}"
        )
    fields = _fields(folder / path / "config.json")
    of_template = _of_transformer(folder).mapping("processing_kwargs").mapping("chat_template").values
    spec = _with_prompts(PoolerSpec(task=EMBED, pooling_type=LAST), folder)
    stored = folder / _MODEL_FIELDS
    return LogitScore(
        true_token=fields.integer("true_token_id", least=0),
        false_token=fields.integer("false_token_id", least=0) if fields.has("false_token_id") else None,
        activation=activation_of_module(_fields(stored).values.get("activation_fn") if stored.is_file() else None),
        prompts=spec.prompts,
        default_prompt=spec.default_prompt,
        max_length=_max_seq_length(folder),
        template_variables=tuple(
            (name, value) for name, value in of_template.items() if isinstance(value, bool | int | str)
        ),
    )


def activation_of_module(name: object) -> str:
    """The activation of scores that a file of sentence-transformers names by its class of torch; "" if it names none that is
    known, so that the usual one is taken."""
    return _OF_SCORES.get(name.rpartition(".")[2], "") if isinstance(name, str) else ""


def read_modules(folder: Path, hidden_size: int) -> PoolerSpec:
    """
    Raises:
        UnsupportedModelError: a module is not known, or has a setting that is not supported.
    """
    modules = [(kind, path) for kind, path in _modules(folder) if kind != "Dropout"]
    kinds = [kind for kind, _ in modules]
    _check_order(folder, kinds)
    _, (pooling, path), *behind = modules
    fields = _fields(folder / path / "config.json")
    if pooling == "SpladePooling":
        spec = PoolerSpec(task=EMBED, pooling_type=MAX, is_head_before=True, activation=_splade(fields))
    else:
        spec = PoolerSpec(task=EMBED, pooling_type=_pooling_mode(fields))
    size = hidden_size
    for kind, path in behind:
        if kind == "Normalize":
            spec = replace(spec, activation=NORMALIZE)
            continue
        dense = _dense(folder, path)
        if dense.in_features != size:
            raise UnsupportedModelError(
                f"{folder / path}: in_features={dense.in_features}, but the module before has {size} features"
            )
        size = dense.out_features
        spec = replace(spec, head=(*spec.head, dense))
    return _with_prompts(replace(spec, max_length=_max_seq_length(folder)), folder)


def _check_order(folder: Path, kinds: Sequence[str]) -> None:
    """
    Raises:
        UnsupportedModelError: the modules stand in an order that is not computed here.
    """
    behind = kinds[2:]
    is_known = tuple(kinds[:2]) in _BEGINNINGS and all(kind in ("Dense", "Normalize") for kind in behind)
    is_splade = kinds[1:2] == ["SpladePooling"]
    if not is_known or "Normalize" in behind[:-1] or (is_splade and behind):
        raise UnsupportedModelError(
            f"{folder / MODULES}: {', '.join(kinds) or 'an empty list'} is not supported. Supported are Transformer, "
            "one Pooling, then any number of Dense, then at most one Normalize; and MLMTransformer, then SpladePooling. To "
            "leave a module out, or to compute it at another place, would change the vectors"
        )


def lowers_case(folder: Path) -> bool:
    """Whether sentence-transformers converts texts to lower case before it tokenises them.

    Raises:
        UnsupportedModelError: its settings cannot be read.
    """
    return has_modules(folder) and _of_transformer(folder).boolean("do_lower_case", False)


def _max_seq_length(folder: Path) -> int | None:
    """To how many tokens sentence-transformers cuts a text; None if its files do not say it."""
    fields = _of_transformer(folder)
    return fields.integer("max_seq_length") if fields.has("max_seq_length") else None


def _of_transformer(folder: Path) -> JsonFields:
    """The settings of the module Transformer; empty if there are none."""
    file = folder / "sentence_bert_config.json"
    return _fields(file) if file.is_file() else JsonFields({}, str(file))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(the last part of the type, path) of each module, in their order."""
    given = read_list(folder / MODULES)
    found = []
    for index, entry in enumerate(given):
        fields = JsonFields(entry if isinstance(entry, Mapping) else {}, f"{folder / MODULES}: entry {index}")
        name, path = fields.text("type", ""), fields.text("path", "")
        if not name.startswith(_LIBRARY):
            raise fields.refusal(
                f"type={name!r} is not a module of sentence-transformers but other code, which is not run here"
            )
        kind = name.rpartition(".")[2]
        if path.startswith(("/", "\\")) or ".." in Path(path).parts:
            raise fields.refusal(f"path={path!r} is outside of the model's folder")
        found.append((kind, path))
    return found


def read_list(path: Path) -> list[object]:
    """The JSON list in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, list):
        raise UnsupportedModelError(f"{path} holds a {type(value).__name__}, not a JSON list")
    return value


def _splade(fields: JsonFields) -> str:
    """The activation behind the pooling: as it never falls, the largest number may be found before it."""
    strategy, activation = fields.text("pooling_strategy", "max"), fields.text("activation_function", "relu")
    if strategy != "max" or activation not in ("relu", "log1p_relu"):
        raise fields.refusal(
            f"pooling_strategy={strategy!r} with activation_function={activation!r} is not supported; supported are max with "
            "relu or log1p_relu"
        )
    return LOG1P_RELU if activation == "relu" else LOG1P_LOG1P_RELU


def _pooling_mode(fields: JsonFields) -> str:
    newer = fields.values.get("pooling_mode")
    modes = [mode for name, mode in _OLDER_FIELDS.items() if fields.values.get(name) is True]
    if isinstance(newer, str):
        modes = [newer]
    elif isinstance(newer, list | tuple):
        modes = [str(mode) for mode in newer]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise fields.refusal(
            f"the pooling {' and '.join(modes) or 'of no kind'} is not supported; supported is one of {', '.join(_MODES)}"
        )
    if fields.values.get("include_prompt") is False:
        raise fields.refusal("include_prompt=false is not supported: the tokens of a prompt would have to be left out")
    return _MODES[modes[0]]


def _dense(folder: Path, path: str) -> DenseSpec:
    fields = _fields(folder / path / "config.json")
    for name in ("module_input_name", "module_output_name"):
        if (given := fields.text(name, _OF_TEXT)) != _OF_TEXT:
            raise fields.refusal(f"{name}={given!r} is not supported; supported is {_OF_TEXT!r}")
    if (folder / path / "pytorch_model.bin").is_file() and not (folder / path / _WEIGHTS).is_file():
        raise fields.refusal(f"its weights are in pytorch_model.bin, which is not read: convert them to {_WEIGHTS}")
    activation = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise fields.refusal(
            f"activation_function={activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return DenseSpec(
        name="linear",
        in_features=fields.integer("in_features"),
        out_features=fields.integer("out_features"),
        bias=fields.boolean("bias", True),
        activation=_ACTIVATIONS[activation],
        file=f"{path}/{_WEIGHTS}",
    )


def _with_prompts(spec: PoolerSpec, folder: Path) -> PoolerSpec:
    file = folder / _MODEL_FIELDS
    if not file.is_file():
        return spec
    fields = _fields(file)
    prompts = []
    for name, text in fields.mapping("prompts").values.items():
        if not isinstance(text, str):
            raise fields.refusal(f"the prompt {name!r} is {text!r}, which is not a text")
        prompts.append((name, text))
    default = fields.text("default_prompt_name", "")
    if default and default not in dict(prompts):
        raise fields.refusal(f"default_prompt_name={default!r} is not in prompts")
    return replace(spec, prompts=tuple(prompts), default_prompt=default)


def _fields(file: Path) -> JsonFields:
    return JsonFields(read_json(file), str(file))
