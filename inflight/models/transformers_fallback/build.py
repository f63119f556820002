"""`build`: makes a model of transformers without memory for its weights, and gives it Inflight's linear layers and head."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version

from inflight.config.engine import ModelConfig
from inflight.config.overrides import merge_overrides
from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES
from inflight.config.unknown_family import SIZE_NAMES, native_refusal
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import UnsupportedModelError
from inflight.hub import read_config as read_json_config
from inflight.layers.context import LayerContext
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.sharding import even_shard
from inflight.layers.vocab import LogitsHead
from inflight.models.transformers_fallback.adapters import Adapter, FusedAdapter, HeadAdapter, replace_module
from inflight.models.transformers_fallback.attention import NAME
from inflight.models.transformers_fallback.default_dtype import DefaultDtype
from inflight.models.transformers_fallback.faster import needs_whole_width
from inflight.models.transformers_fallback.trunk import Trunk

logger = logging.getLogger(__name__)

# Ranks may be threads. One at a time builds a model, because transformers may replace parts of its modules meanwhile
# (`apply_patches`), and reads source code, because Python 3.11 cannot make two syntax trees at once ("AST constructor recursion
# depth mismatch").
BUILDING = threading.Lock()


class _SharedTable:
    """The rows of an embedding of transformers that this rank's head multiplies with."""

    def __init__(self, embedding: nn.Module, context: LayerContext) -> None:
        self._embedding = embedding
        self._tp = context.tp

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._embedding.weight  # type: ignore[assignment]
        num_rows = -(-len(weight) // self._tp.size)
        rows = weight.data[self._tp.rank * num_rows : (self._tp.rank + 1) * num_rows]
        return F.pad(rows, (0, 0, 0, num_rows - len(rows)))


class EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` gives tensors without memory. So weights take none, but tables that a constructor computes are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def read_config(model_config: ModelConfig) -> PreTrainedConfig:
    """
    Raises:
        UnsupportedModelError: transformers does not know the model, or has no decoder for it.
    """
    folder = model_config.folder
    trusts = model_config.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
        if overrides := model_config.config_overrides:
            content = read_json_config(folder)
            merged = deepcopy(merge_overrides(content, overrides))
            is_same = merged.get("model_type") == content.get("model_type")
            config_class = type(config) if is_same else CONFIG_MAPPING[merged["model_type"]]
            config = config_class.from_dict(merged, name_or_path=str(folder))
    except Exception as error:  # also its own errors of fields, which have no common class
        if not trusts and "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"transformers does not know {model_config.architecture.name}; the model brings Python files of its own "
                "(auto_map in config.json): read them, and set trust_remote_code=True (--trust-remote-code) to run them"
            ) from error
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise UnsupportedModelError(
            f"config.json: {_not_native(model_config)}transformers {transformers_version} cannot read this configuration; "
            f"a newer transformers may: {reason}{native_refusal(model_config.architecture)}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def warn_of_unknown_overrides(model_config: ModelConfig) -> None:
    """Logs the names of `hf_overrides` that transformers' configuration of this model does not have."""
    if not model_config.config_overrides:
        return
    plain = read_config(replace(model_config, config_overrides={}))
    known = {*vars(plain), *vars(plain.get_text_config()), *read_json_config(model_config.folder), *plain.attribute_map}
    known |= {"rope_theta", "rope_scaling", "torch_dtype", *(name for names in SIZE_NAMES.values() for name in names)}
    names = [name for name in model_config.config_overrides if name not in known and not hasattr(plain, name)]
    if names:
        logger.warning(
            "hf_overrides: transformers' configuration of %s has no %s",
            model_config.architecture.name,
            ", ".join(names),
        )


def _not_native(model_config: ModelConfig) -> str:
    name = model_config.architecture.name
    families = ", ".join(SUPPORTED_ARCHITECTURES)
    return (
        f"{name} is not one of Inflight's own families ({families}), and "
        if name not in SUPPORTED_ARCHITECTURES
        else ""
    )


def build(model_config: ModelConfig, context: LayerContext, attention: str = NAME) -> PreTrainedModel:
    """The model in eval mode; a `Trunk` if it makes vectors. Its weights are on the meta device; its tables are on the device
    of `context`. `attention`: the name of an attention function in transformers.

    Raises:
        UnsupportedModelError: transformers cannot build the model.
    """
    with BUILDING, DefaultDtype(context.dtype), EmptyOnMeta():
        config = read_config(model_config)
        # without a dtype, transformers does not change the default dtype of the whole process
        options = {"dtype": None, "attn_implementation": attention, "trust_remote_code": model_config.trust_remote_code}
        makes_vectors = model_config.architecture.pooler is not None
        try:
            if makes_vectors:
                model = Trunk(AutoModel.from_config(config, **options))
            else:
                auto = AutoModelForImageTextToText if _is_for_images(config) else AutoModelForCausalLM
                model = auto.from_config(config, **options)
        except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError) as error:
            form = "without its head" if makes_vectors else "as a causal LM"
            raise UnsupportedModelError(
                f"transformers cannot build {model_config.architecture.name} {form} with another attention: "
                f"{_cause(error)}{native_refusal(model_config.architecture)}"
            ) from error
    assert isinstance(model, PreTrainedModel)
    for each in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        if each is not None:
            each.dtype = context.dtype
    model.tie_weights()
    move(model, context)
    return model.eval()


def _is_for_images(config: PreTrainedConfig) -> bool:
    """Whether transformers has no class for this model without its part for images."""
    return (
        type(config) not in AutoModelForCausalLM._model_mapping
        and type(config) in AutoModelForImageTextToText._model_mapping
    )


def leave_out_towers(model: PreTrainedModel) -> tuple[str, ...]:
    """Removes what a model for images has beside its decoder, which makes embeddings of images. Returns the beginnings of the
    names of its weights."""
    if not _is_for_images(model.config):
        return ()
    base, decoder = model.base_model, model.get_decoder()
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    names = [
        name
        for name, part in base.named_children()
        if base is not decoder and all(part_ is not decoder for part_ in part.modules())
    ]
    for name in names:
        setattr(base, name, nn.Identity())
    return tuple(f"{prefix}{name}." for name in names)


def _cause(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "its attention is code of its own, which does not use transformers' attention functions"
    return f"{type(error).__name__}: {error}"


def move(model: PreTrainedModel, context: LayerContext) -> None:
    """Frees the memory of all weights, makes those float32 that transformers keeps so, and moves tables to the device."""
    strict = model._keep_in_fp32_modules_strict or ()
    half = model._keep_in_fp32_modules or ()
    kept = {*strict, *(half if context.dtype == torch.float16 else ())}
    moved: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                dtype = torch.float32 if is_kept(f"{prefix}.{name}", kept) else parameter.dtype
                moved[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), False)
                moved[id(moved[id(parameter)])] = moved[id(parameter)]
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and name not in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=context.device))
            elif buffer.is_meta:
                raise UnsupportedModelError(f"the table {prefix}.{name} has no values before weights are loaded")
            else:
                setattr(module, name, buffer.to(context.device))


def is_kept(name: str, kept: set[str]) -> bool:
    return any(re.search(rf"(^|\.){re.escape(each)}(\.|$)", name) for each in kept)


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers, and its name. A model may have other lists, for example in an encoder of images.

    Raises:
        UnsupportedModelError: there is no list of layers.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    beginnings = tuple(f"{name}." for name, _ in lists)
    outer = [(name, each) for name, each in lists if not name.startswith(beginnings)]
    if not outer:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers")
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    inside = set(model.get_decoder().modules())

    def rank(layers: nn.ModuleList) -> tuple[bool, bool, int]:
        return len(layers) == num_layers, layers in inside, sum(weight.numel() for weight in layers.parameters())

    return max(outer, key=lambda item: rank(item[1]))


def replace_linears(model: PreTrainedModel, layers: str, context: LayerContext) -> None:
    """Gives the decoder layers Inflight's linear layers. Several ranks share those that transformers' plan divides ("colwise",
    "rowwise"); every rank computes the others, and MLPs that need the whole width.

    Raises:
        UnsupportedModelError: there are several ranks, but transformers has no plan for the model.
    """
    plan = model.tp_plan if context.tp.size > 1 else {}
    if context.tp.size > 1 and not {"colwise", "rowwise"} & set(plan.values()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers has no plan to divide it among ranks; leave tensor_parallel_size out"
        )

    whole = {name for name, module in model.named_modules() if plan and needs_whole_width(module)}

    def kind(name: str) -> str | None:
        if name.rpartition(".")[0] in whole:
            return None
        return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    for name, module in list(model.named_modules()):
        linears = {
            f"{name}.{leaf}": child
            for leaf, child in module.named_children()
            if type(child) is nn.Linear
            and f"{name}.".startswith(f"{layers}.")
            and child.weight.dtype == context.dtype
            and not _reads_weight_of(module, leaf)
        }
        for names in _fused(linears, kind):
            first = linears[names[0]]
            has_bias = first.bias is not None
            in_features = first.in_features
            if kind(names[0]) == "rowwise":
                linear = RowParallelLinear(in_features, first.out_features, bias=has_bias, context=context)
                replace_module(model, names[0], Adapter(linear))
                continue
            tp = context.tp if kind(names[0]) == "colwise" else TensorParallelGroup()
            parts = {each.rpartition(".")[2]: even_shard(linears[each].out_features, tp) for each in names}
            column = ColumnParallelLinear(in_features, parts, bias=has_bias, context=context)
            adapters = [Adapter(column)] if len(names) == 1 else FusedAdapter(column).with_parts()
            for each, adapter in zip(names, adapters, strict=True):
                replace_module(model, each, adapter)


def _fused(linears: Mapping[str, nn.Linear], kind: Callable[[str], str | None]) -> Iterator[tuple[str, ...]]:
    """Groups the linear layers of a module: its projections to queries, keys and values are one group if they are alike."""
    group = tuple(name for name in linears if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"))
    alike = {(linears[name].in_features, linears[name].bias is None, kind(name)) for name in group}
    if len(group) == 3 and len(alike) == 1 and kind(group[0]) != "rowwise":
        yield group
    else:
        group = ()
    yield from ((name,) for name in linears if name not in group)


def _reads_weight_of(parent: nn.Module, leaf: str) -> bool:
    """Whether the code of `parent` uses the weight of its layer `leaf`, which Inflight's layers do not keep."""
    with BUILDING:
        return f"self.{leaf}.weight" in _source(type(parent))  # type: ignore[arg-type]


@functools.cache
def _source(module_class: type[object]) -> str:
    return inspect.getsource(module_class)  # parses the whole file


def replace_head(model: PreTrainedModel, context: LayerContext) -> None:
    """Gives the model Inflight's head, if the model's own is a linear layer."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype != context.dtype:
        return
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, leaf = name.rpartition(".")
    if _reads_weight_of(model.get_submodule(parent), leaf):
        return
    tied = _SharedTable(embedding, context) if getattr(embedding, "weight", None) is head.weight else None
    ours = LogitsHead(head.out_features, head.in_features, tied_embedding=tied, context=context)  # type: ignore[arg-type]
    replace_module(model, name, HeadAdapter(ours, head.bias))
