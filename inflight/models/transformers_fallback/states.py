"""Recurrent layers that transformers computes: Mamba, gated delta rules, short convolutions.

Such a layer of transformers reads and writes its state through a cache object. `PackedStates` takes the place of this object.
Which modules have states, and their shapes, is recorded in one run, as with attention. In a step, a module with states runs
once for each sequence, on the tensors of the sequence's state in the arena. If states inside the
sequence must be kept, at ends of blocks or after drafts, it runs once for each such part.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionMetadata, StateMetadata
from inflight.layers.recurrent_state import RecurrentState

# Kinds of layers whose state is not keys and values.
_RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "short_conv", "hybrid", "hybrid_sliding", "moe_mamba"}


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether the model may have layers with a recurrent state."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return bool(kinds & _RECURRENT) or model._is_stateful


class _Slot(NamedTuple):
    """Where transformers' cache has a tensor: `layers[layer].<kind>[number]`."""

    kind: str  # "conv_states" or "recurrent_states"
    layer: int
    number: int


class PackedStates(DynamicCache):  # type: ignore[misc]
    """The states of all recurrent layers of a model. Of attention it keeps nothing: `PackedAttention` has keys and values.

    Attributes:
        metadata: that of the current step; None outside of steps.
        chosen: names of the layers that keep their state in this step; None: all.
        token_by_token: whether tokens that continue a state run one by one. Some families ignore the state otherwise.
    """

    def __init__(self, config: PreTrainedConfig, name_of: Callable[[nn.Module], str]) -> None:
        super().__init__(config=config)
        self.metadata: tuple[AttentionMetadata, ...] | None = None
        self.chosen: set[str] | None = None
        self.token_by_token = False
        self._config = config
        self._name_of = name_of
        # what each module has returned for the first tokens; Any: tensors in any structure
        self._results: dict[str, Any] = {}
        self._users: dict[nn.Module, dict[_Slot, None]] | None = None  # while a run is recorded

    def begin_recording(self) -> None:
        self.layers = DynamicCache(config=self._config).layers
        self._users = {}

    def end_recording(self, backend: AttentionBackend) -> dict[str, RecurrentState]:
        """From now on, the modules that have used states run sequence by sequence. Returns module name -> state."""
        users = self._users or {}
        self._users = None
        found: dict[str, RecurrentState] = {}
        inner = {id(child) for module in users for child in module.modules() if child is not module}
        for module in [module for module in users if id(module) not in inner]:
            used = {slot for child in module.modules() for slot in users.get(child, ())}
            slots = sorted(slot for slot in used if self._tensor(slot) is not None)
            tensors = [self._tensor(slot) for slot in slots]
            name = self._name_of(module)
            state = RecurrentState(
                name, [tuple(each.shape) for each in tensors], [each.dtype for each in tensors], backend
            )
            found[name] = state
            module.forward = partial(self._run, state, slots, type(module).forward.__get__(module))
        return found

    def _tensor(self, slot: _Slot) -> Any:  # Any: transformers' own
        return getattr(self.layers[slot.layer], slot.kind)[slot.number]

    def _note(self, kind: str, layer: int, index: int) -> None:
        """While a run is recorded: notes that the module whose method runs now uses this tensor. The cache's methods do not get
        the module, so it is looked for in the frames of the callers."""
        if self._users is None:
            return
        frame = sys._getframe(2)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module):
                self._users.setdefault(caller, {})[_Slot(kind, layer, index)] = None
                return
            frame = frame.f_back  # type: ignore[assignment]

    def _run(
        self, state: RecurrentState, slots: list[_Slot], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:  # Any: each family has its own arguments
        if self.metadata is None:
            return forward(*args, **kwargs)
        results = []
        if self.chosen is not None and state.layer_name not in self.chosen:
            return _pytree.tree_map(partial(_zeros_like, self.metadata[0].num_tokens), self._results[state.layer_name])
        metadata = self.metadata[state.group_index]
        assert isinstance(metadata, StateMetadata), f"metadata of another layer: {type(metadata).__name__}"
        for tokens, source, target in metadata.pieces():
            tensors = state.tensors(target)
            for i, tensor in enumerate(tensors):
                if source is None:
                    tensor.zero_()
                elif source != target:
                    tensor.copy_(state.tensors(source)[i])
            for slot, tensor in zip(slots, tensors, strict=True):
                layer: Any = self.layers[slot.layer]
                getattr(layer, slot.kind)[slot.number] = tensor  # the layer changes it in place
                layer.has_previous_state[slot.number] = source is not None
            is_cut = self.token_by_token and source is not None
            cuts = range(tokens.start, tokens.stop + 1) if is_cut else (tokens.start, tokens.stop)
            for start, stop in pairwise(cuts):
                own = partial(_rows_of, slice(start, stop), metadata.num_tokens)
                results.append(forward(*_pytree.tree_map(own, args), **_pytree.tree_map(own, kwargs)))
        first, *others = results
        self._results.setdefault(state.layer_name, first)
        if not others:
            return first
        return _pytree.tree_map(_concatenate, first, *others)

    # What models call, see `transformers.Cache`. Any: what the methods there return

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note("conv_states", layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note("conv_states", layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note("recurrent_states", layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self._note("recurrent_states", layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


def _zeros_like(num_tokens: int, result: object) -> object:
    if not isinstance(result, Tensor):
        return result
    return result.new_zeros(1, num_tokens, *result.shape[2:])


def _rows_of(tokens: slice, num_tokens: int, argument: object) -> object:
    """Of a tensor [1, num_tokens, ...], the rows of some tokens; anything else as it is."""
    is_packed = isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[:2] == (1, num_tokens)
    return argument[:, tokens] if is_packed else argument  # type: ignore[index]


def _concatenate(*results: object) -> object:
    return torch.cat(results, dim=1) if isinstance(results[0], Tensor) else results[0]  # type: ignore[arg-type]
