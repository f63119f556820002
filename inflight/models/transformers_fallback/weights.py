"""Where the tensors of a checkpoint go in a model of transformers.

transformers renames tensors while it loads them, and converts some: it stacks the weights of experts, for example. `WeightPlan`
says for each tensor of the checkpoint which weights it becomes. `FallbackUnit` is a decoder layer, or everything that is in no
decoder layer.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots
from inflight.models.transformers_fallback.adapters import Adapter
from inflight.models.transformers_fallback.trunk import Trunk


@dataclass(frozen=True)
class Checkpoint:
    """
    Attributes:
        stored: name -> shape of each tensor of the checkpoint; None if the model gets random weights.
        differ: whether two tensors of the checkpoint differ.
        load: gives a unit memory and its weights, also after `finish_loading`.
    """

    stored: Mapping[str, tuple[int, ...]] | None
    differ: Callable[[str, str], bool]
    load: Callable[[Loadable, str], None]

    def plan(self, model: PreTrainedModel) -> "WeightPlan | None":
        """Returns where the tensors go in this model; None if it gets random weights."""
        if self.stored is None:
            return None
        return WeightPlan(model, self.stored, self.differ)


class WeightPlan:
    """What each tensor of a checkpoint becomes.

    config.json may say that two weights are one, such as those of embedding and head. If the checkpoint has both, and they
    differ, each gets its own (`model` is changed). If it has only one of them, this one is used.

    Args:
        stored: name -> shape of each tensor.
        differ: whether two tensors of the checkpoint differ.
    """

    def __init__(
        self, model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]], differ: Callable[[str, str], bool]
    ) -> None:
        names = model.state_dict(keep_vars=True)
        tied_to = {
            tied: kept for tied, kept in model.all_tied_weights_keys.items() if names.get(tied) is names.get(kept)
        }
        self._model = model
        self._stored = stored
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        self.renamed: dict[str, str] = {}  # weight -> tensor of the checkpoint
        # the first weight that a conversion gives -> (the conversion, [(pattern, tensor of the checkpoint)])
        self.converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
        self.unread: set[str] = set()
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        plain: dict[str, str] = {}  # weight -> tensor of the checkpoint, of those that need no conversion
        found: list[tuple[str, str, str | None]] = []
        for source in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, names)
            if name not in names and source in names:
                name = source
                pattern = None
            found.append((source, name, pattern))
            if pattern is None:
                plain[name] = source
        self.tied = set(tied_to)
        only_one: set[str] = set()  # tensors of which the checkpoint has no other copy
        for tied, kept in tied_to.items():
            if tied in plain and kept in plain and differ(plain[tied], plain[kept]):
                _untie(model, tied)
                self.tied.remove(tied)
            elif tied in plain and kept not in plain:
                self.renamed.setdefault(kept, plain[tied])
                only_one.add(self.renamed[kept])
        for source, name, pattern in found:
            if source in only_one:
                continue
            if name not in names or name in self.tied:
                is_of_head = isinstance(model, Trunk)  # the weights of the trunk itself are all needed
                if is_of_head or name in self.tied or any(re.search(each, name) for each in ignored):
                    self.unread.add(source)
            elif pattern is None:
                self.renamed[name] = source
            else:
                self.converted.setdefault(name, (deepcopy(by_pattern[pattern]), []))[1].append((pattern, source))
        self.names: Collection[str] = names

    def convert(self, name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that the tensors of `converted[name]` become. `parts`: tensor of the checkpoint -> its values."""
        converter, sources = self.converted[name]
        for pattern, source in sources:
            converter.add_tensor(name, source, pattern, parts[source])
        found: dict[str, Any] = converter.convert(name, model=self._model, config=self._model.config)
        return {target: each[0] if isinstance(each, list) else each for target, each in found.items()}

    def sources_of(self, prefixes: tuple[str, ...]) -> set[str]:
        """The tensors of the checkpoint that become weights whose names begin with one of `prefixes`."""
        renamed = {source for name, source in self.renamed.items() if name.startswith(prefixes)}
        converted = [parts for name, (_, parts) in self.converted.items() if name.startswith(prefixes)]
        return renamed | {source for parts in converted for _, source in parts}

    def shape(self, source: str) -> tuple[int, ...]:
        return self._stored[source]


def _untie(model: PreTrainedModel, name: str) -> None:
    """Gives a weight memory of its own, as soon as it gets memory."""
    parent, _, leaf = name.rpartition(".")
    shared = model.get_parameter(name)
    setattr(model.get_submodule(parent), leaf, nn.Parameter(torch.empty_like(shared, device="meta"), False))
    model.all_tied_weights_keys.pop(name)


class FallbackUnit(Loadable):
    """The modules of `model` whose names begin with `prefix`, but with none of `excluded`. `plan`: None for random weights."""

    def __init__(self, model: PreTrainedModel, prefix: str, excluded: tuple[str, ...], plan: WeightPlan | None) -> None:
        super().__init__()
        self.modules_of_unit = {
            name: module
            for name, module in model.named_modules()
            if name.startswith(prefix) and not name.startswith(excluded or ("\0",))
        }
        self.plan = plan
        self.parts: dict[str, Tensor] = {}  # tensors of the checkpoint that a conversion needs

    def allocate(self, device: torch.device) -> None:
        made: dict[int, nn.Parameter] = {}
        for module in self.modules_of_unit.values():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.is_meta and id(weight) not in made:
                    memory = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                    made[id(weight)] = nn.Parameter(memory, False)
                if weight.is_meta:
                    setattr(module, name, made[id(weight)])

    def targets(self) -> Iterator[tuple[str, WeightSlot]]:
        """(name in transformers, slot) of each weight of the unit."""
        for name, module in self.modules_of_unit.items():
            if isinstance(module, Adapter):
                yield from module.inner.weight_slots(name)
            elif isinstance(module, Loadable):
                continue  # its adapter has listed its weights
            for leaf, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if leaf not in module._non_persistent_buffers_set:
                    is_scale = weight.dim() == 1 and leaf == "weight"
                    slot = WeightSlot(shape=tuple(weight.shape), destination=weight.data, is_scale=is_scale)
                    yield f"{name}.{leaf}" if name else leaf, slot

    def weight_slots(self, prefix: str) -> WeightSlots:
        targets = dict(self.targets())
        if self.plan is None:
            filled: set[int] = set()
            for name, slot in targets.items():
                if slot.destination.data_ptr() not in filled:  # a tied weight has two names
                    yield name, slot
                filled.add(slot.destination.data_ptr())
            return
        for name, slot in targets.items():
            if name in self.plan.renamed:
                yield self.plan.renamed[name], slot
            elif name in self.plan.converted:
                for _, source in self.plan.converted[name][1]:
                    shape = self.plan.shape(source)
                    kept = torch.empty(shape, dtype=torch.float32, device="meta")
                    yield source, WeightSlot(shape=shape, destination=kept, accept=partial(_keep, self.parts, source))

    def finish_loading(self) -> None:
        if self.plan is not None:
            targets = dict(self.targets())
            for name in [name for name in targets if name in self.plan.converted]:
                for target, values in self.plan.convert(name, self.parts).items():
                    _fill(target, targets[target], values)
            self.parts.clear()
        for module in self.modules_of_unit.values():
            if isinstance(module, Adapter):
                module.inner.finish_loading()

    def to_float32(self) -> None:
        self._dtypes = {name: weight.dtype for name, weight in self._weights()}
        self._replace(lambda _, weight: weight.float() if weight.is_floating_point() else weight)

    def to_own_dtypes(self) -> None:
        """Undoes `to_float32`."""
        self._replace(lambda name, weight: weight.to(self._dtypes[name]))

    def free(self) -> None:
        """Frees the memory of the weights. `allocate` can follow."""
        self._replace(lambda name, weight: weight.new_empty(weight.shape, dtype=self._dtypes[name], device="meta"))

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, module in self.modules_of_unit.items():
            yield from module.named_parameters(name, recurse=False)

    def _replace(self, change: Callable[[str, Tensor], Tensor]) -> None:
        made: dict[int, nn.Parameter] = {}
        for name, weight in list(self._weights()):
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(change(name, weight.data), False)
            prefix, _, leaf = name.rpartition(".")
            setattr(self.modules_of_unit[prefix], leaf, made[id(weight)])


def _keep(parts: dict[str, Tensor], source: str, part: Tensor | QuantizedWeight) -> bool:
    """Keeps a part of the checkpoint until its conversion."""
    parts[source] = part.dequantize() if isinstance(part, QuantizedWeight) else part
    return True


def _fill(name: str, slot: WeightSlot, values: Tensor) -> None:
    if tuple(values.shape) != slot.shape:
        raise CheckpointError(f"{name} has shape {list(values.shape)}, but config.json asks for {list(slot.shape)}")
    held = values.narrow(slot.dim, slot.start, slot.size)
    if slot.accept is None or not slot.accept(held):
        slot.destination.copy_(held)


def make_units(
    model: PreTrainedModel, layers_name: str, start: int, num_layers: int, plan: WeightPlan | None
) -> list[tuple[str, FallbackUnit]]:
    """A unit for each decoder layer from layer `start` on, and one for all other modules."""
    names = [f"{layers_name}.{i}" for i in range(start, start + num_layers)]
    units = [(name, FallbackUnit(model, f"{name}.", (), plan)) for name in names]
    return [*units, ("", FallbackUnit(model, "", tuple(f"{name}." for name in names), plan))]


def missing_weights(units: list[tuple[str, FallbackUnit]], plan: WeightPlan, model: PreTrainedModel) -> list[str]:
    """The weights that no tensor of the checkpoint becomes."""
    given = {*plan.renamed, *plan.converted, *plan.tied}
    for name, (converter, _) in plan.converted.items():
        first = converter.target_patterns[0]
        given |= {name.replace(first, each) for each in converter.target_patterns}
    ignored = model._keys_to_ignore_on_load_missing or ()
    return [
        name
        for _, unit in units
        for name, _ in unit.targets()
        if name not in given and not any(re.search(each, name) for each in ignored)
    ]
