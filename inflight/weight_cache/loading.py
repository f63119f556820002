"""How the units of a model get their weights: from the checkpoint (`Loading`), from the checkpoint while everything is
recorded for a packed file (`NotedLoading`), or from a packed file (`MappedLoading`).

A unit that is mapped is neither allocated nor filled: its large weights stay on the meta device until the parameters that it
keeps are replaced by views of the file. Then `finish_loading` runs as always, and the linear method gives the products of the
file. So `finish_loading` must not change a large parameter in place, other than to what it is already.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor, nn

from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.layers.context import LayerContext
from inflight.layers.linear_method import LinearMethod
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM
from inflight.weight_cache.folder import CacheFolder
from inflight.weight_cache.identity import FileIdentity
from inflight.weight_cache.linear import Calls, MappedLinear, NotedLinear, next_of, numbers_of
from inflight.weight_cache.packed_file import (
    Index,
    Layout,
    PackedFile,
    PackedFileError,
    StoredProduct,
    StoredTensor,
    StoredUnit,
    write_packed,
)

logger = logging.getLogger(__name__)

Fill = Callable[[Loadable, str], None]  # gives a unit memory and the weights of the checkpoint; its prefix


class Loading:
    """From the checkpoint, without a cache."""

    notes: tuple[str, ...] = ()  # messages of an earlier start about these weights

    def wrap(self, context: LayerContext) -> LayerContext:
        """The context with which the model is made."""
        return context

    def load(self, model: CausalLM, fill: Fill) -> None:
        """Loads all units.

        Raises:
            PackedFileError: the packed file is not one of this model. The model cannot be used any more.
        """
        for prefix, unit in model.load_units():
            fill(unit, prefix)
            unit.finish_loading()


class NotedLoading(Loading):
    """Records the tensors of each unit. They stay in the model's memory."""

    def __init__(self) -> None:
        self._calls: Calls = []
        self._units: list[tuple[str, list[tuple[str, Tensor]], Calls]] = []
        self._obstacle: str | None = None

    def wrap(self, context: LayerContext) -> LayerContext:
        return _with_methods(context, lambda method: NotedLinear(method, self._calls))

    def load(self, model: CausalLM, fill: Fill) -> None:
        for prefix, unit in model.load_units():
            self._calls.clear()
            fill(unit, prefix)
            filled = {name: weight.data for name, weight in unit.named_parameters() if not weight.is_meta}
            known = {weight.untyped_storage().data_ptr() for weight in filled.values()}
            for name, slot in unit.weight_slots(prefix):
                if slot.destination.numel() and slot.destination.untyped_storage().data_ptr() not in known:
                    self._obstacle = f"{name} is not filled into a parameter"
            unit.finish_loading()
            kept = [(name, filled[name]) for name, weight in unit.named_parameters() if name in filled]
            if any(call is None for call in self._calls):
                self._obstacle = f"a product of {prefix} has a shape that the C++ kernels do not support"
            self._units.append((prefix, kept, list(self._calls)))

    def write(
        self, folder: CacheFolder, key: str, notes: tuple[str, ...], *, limit_bytes: int, is_stopped: Callable[[], bool]
    ) -> bool:
        """As `write_packed`."""
        if self._obstacle is not None:
            raise PackedFileError(self._obstacle)
        layout = Layout()
        units = tuple(
            StoredUnit(
                prefix,
                tuple((name, layout.add(tensor)) for name, tensor in kept),
                tuple(tuple(_store(layout, product) for product in call or ()) for call in calls),
            )
            for prefix, kept, calls in self._units
        )

        def make_index(identity: FileIdentity, samples: tuple[int, ...]) -> Index:
            return Index(identity, samples, units, notes)

        return write_packed(folder, key, layout, make_index, limit_bytes=limit_bytes, is_stopped=is_stopped)


class MappedLoading(Loading):
    """From a packed file."""

    def __init__(self, file: PackedFile, kernels: KernelLibrary) -> None:
        self.notes = file.index.notes
        self.file = file
        self._kernels = kernels
        self._calls: Iterator[tuple[StoredProduct, ...]] = iter(())

    def wrap(self, context: LayerContext) -> LayerContext:
        def next_call() -> tuple[StoredProduct, ...]:
            return next_of(self._calls)

        return _with_methods(context, lambda method: MappedLinear(method, self._kernels, self.file, next_call))

    def load(self, model: CausalLM, fill: Fill) -> None:
        model.mapped_bytes = len(self.file.content)
        units = model.load_units()
        stored_units = self.file.index.units
        if [prefix for prefix, _ in units] != [stored.prefix for stored in stored_units]:
            raise PackedFileError("its units are not those of the model")
        for (_, unit), stored in zip(units, stored_units, strict=True):
            self._calls = iter(stored.calls)
            for name, tensor in stored.parameters:
                _set_parameter(unit, name, self.file, tensor)
            unit.finish_loading()
            if next(self._calls, None) is not None:
                raise PackedFileError("it has more products than the model")
            if left := [name for name, weight in unit.named_parameters() if weight.is_meta]:
                raise PackedFileError(f"it lacks the weight {left[0]}")


def _with_methods(context: LayerContext, wrap: Callable[[LinearMethod], LinearMethod]) -> LayerContext:
    return replace(context, linear=wrap(context.linear), head=wrap(context.head), floats=wrap(context.floats))


def _store(layout: Layout, product: PackedLinear) -> StoredProduct:
    fields, table = numbers_of(product.weight)
    return StoredProduct(
        layout.add(product.packed),
        None if product.bias is None else layout.add(product.bias),
        str(product.dtype).removeprefix("torch."),
        fields,
        table,
    )


def _set_parameter(unit: Loadable, name: str, file: PackedFile, stored: StoredTensor) -> None:
    """Large weights become views of the file. Small ones, which the constructor has allocated, are copied."""
    try:
        weight = unit.get_parameter(name)
    except AttributeError:
        raise PackedFileError(f"it has a weight {name}, which the model does not have") from None
    tensor = file.tensor(stored)
    if weight.shape != tensor.shape or weight.dtype != tensor.dtype:
        raise PackedFileError(f"its weight {name} has the wrong shape or dtype")
    if not weight.is_meta:
        weight.data.copy_(tensor)
        return
    parent, _, leaf = name.rpartition(".")
    setattr(unit.get_submodule(parent), leaf, nn.Parameter(tensor, False))
