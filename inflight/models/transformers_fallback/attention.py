"""The attention of models that transformers computes: `attend` takes the place of its attention functions.

transformers' models call a registered function for the attention of a layer, and another one for the mask. Ours computes the
attention on Inflight's KV cache. All sequences of a step are one row of tokens, as in Inflight's own models.

What a layer needs is not read from the configuration, but recorded: `PackedAttention.record` runs the model once on a few
tokens, and sees each call with its shapes, its scale, its mask and its keywords. A call that our attention would compute
differently is refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from inflight.attention.backend import AttentionBackend, AttentionParams, LayerCache
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionMetadata
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.errors import UnsupportedModelError
from inflight.kernels.cpu.limits import BLOCK_SIZE_MULTIPLE, HEAD_DIM_MULTIPLE
from inflight.layers.attention import Attention
from inflight.layers.recurrent_state import RecurrentState
from inflight.models.transformers_fallback.states import PackedStates, is_recurrent

NAME = "inflight"  # of our functions in transformers
_STATE = "inflight_attention"  # the attribute of transformers' modules that holds the model's `PackedAttention`

# Keywords that change nothing here: eager attention does not read them, or the mask and the packed tokens say the same.
_IGNORED = {"dropout", "sliding_window", "position_ids", "layer_idx", "num_items_in_batch"}


class _CountedPositions(TorchFunctionMode):
    """Notes which modules call `torch.arange` themselves: their result may depend on where a token is in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        if func is torch.arange:
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and hasattr(caller, _STATE):
                self.names.add(getattr(caller, _STATE)[1])
        return func(*args, **(kwargs or {}))


class Mask:
    """Stands for a mask: it keeps the function that says which keys a query sees. Models may take a part of it."""

    def __init__(self, function: Callable[..., Tensor], use_vmap: bool) -> None:
        self._function = function
        self._use_vmap = use_vmap

    def __getitem__(self, part: object) -> Mask:
        return self

    def to(self, *_: object, **__: object) -> Mask:
        return self

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedModelError("the model computes with its mask (it adds a bias to it, for example)")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and torch ask for special methods
            raise AttributeError(name)
        self._refuse()

    @classmethod
    # Any: torch's own
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """torch asks here if a model gives its mask to one of torch's functions."""
        raise UnsupportedModelError(
            f"the model computes with its mask, in torch's {func.__name__}: its attention is code of its own, or has a bias"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = __invert__ = _refuse

    def window(self, max_model_len: int, *, is_causal: bool = True) -> int | None:
        """How many tokens a query sees, its own included; None: all tokens before it, or if it is not causal, all tokens.

        Raises:
            UnsupportedModelError: at one of the positions that were looked at, the mask hides other tokens.
        """

        def sees(position: int) -> Tensor:
            row = sdpa_mask(
                *(1, 1, max_model_len, position),
                mask_function=self._function,
                allow_is_causal_skip=False,
                use_vmap=self._use_vmap,
            )
            return torch.as_tensor(row, dtype=torch.bool, device="cpu").view(max_model_len)

        last = max_model_len - 1
        if not is_causal:
            if all(bool(sees(position).all()) for position in {0, 1, last // 2, last} if position <= last):
                return None
            raise UnsupportedModelError("its mask hides tokens of a text from each other")
        window = int(sees(last).sum())
        keys = torch.arange(max_model_len, dtype=torch.int64, device="cpu")
        sizes = [size << i for i in range(max_model_len.bit_length()) for size in (1, window)]
        near = {size + offset for size in sizes for offset in (-1, 0, 1)}
        for position in sorted(position for position in {0, last, *near} if 0 <= position <= last):
            if not torch.equal(sees(position), (keys <= position) & (keys > position - window)):
                raise UnsupportedModelError(
                    f"its mask is neither causal nor a sliding window (position {position}, max_model_len={max_model_len})"
                )
        return None if window == max_model_len else window


@dataclass(frozen=True)
class _Call:
    """One call of the attention, as it was recorded."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int  # after padding
    value_dim: int
    dtype: torch.dtype
    params: AttentionParams


class PackedAttention:
    """The attention of all layers of one model. A layer is (module, n): the n-th call of this module in a forward.

    Attributes:
        backend: the given one, or plain torch if the C++ kernel does not support a layer.
        states: of the recurrent layers; None if there are none.
        layers: all layers with a cache, in the order of the model.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, max_model_len: int, *, is_causal: bool = True
    ) -> None:
        self._is_causal = is_causal
        self.layers: dict[str, Attention | RecurrentState] = {}
        self.states = PackedStates(model.config, lambda module: _named(module)[1]) if is_recurrent(model) else None
        self.backend = backend
        self._max_model_len = max_model_len
        self._calls: dict[tuple[str, int], _Call] = {}
        self._windows: dict[int, tuple[Mask, int | None]] = {}  # by the id of the mask, while calls are recorded
        self._num_calls: Counter[str] = Counter()
        self._metadata: tuple[AttentionMetadata, ...] | None = None  # None: calls are recorded
        self._chosen: set[str] | None = None
        self._names: list[str] = []
        for name, module in model.named_modules():
            setattr(module, _STATE, (self, name))
            self._names.append(name)

    @contextmanager
    def step(self, metadata: tuple[AttentionMetadata, ...], layers: Sequence[int] | None = None) -> Iterator[None]:
        """While this is open, calls are those of one step. If `layers` is given, only these layers compute anything."""
        self._num_calls.clear()
        names = list(self.layers)
        self._metadata = metadata
        self._chosen = None if layers is None else {names[index] for index in layers}
        if self.states is None:
            yield
            return
        self.states.metadata = metadata
        self.states.chosen = self._chosen
        try:
            yield
        finally:
            self.states.metadata = None

    def record(self, run: Callable[[], object]) -> None:
        """`run` runs the model on one sequence. Fills `layers`."""
        self._metadata = None
        for each in (self._calls, self.layers, self._num_calls):
            each.clear()
        if self.states is not None:
            self.states.begin_recording()
        with _CountedPositions() as counted:
            run()
        recurrent = {} if self.states is None else self.states.end_recording(self.backend)
        for outer in recurrent:
            if any(name == outer or name.startswith(f"{outer}.") for name, _ in self._calls):
                raise UnsupportedModelError(f"{outer} has both a recurrent state and attention")
        for name, _ in self._calls:
            if name in counted.names:
                raise UnsupportedModelError(
                    f"{name} counts the positions of its tokens itself, from the beginning of the row"
                )
        if isinstance(self.backend, CpuPagedBackend) and not all(map(_is_for_kernel, self._calls.values())):
            self.backend = TorchSdpaBackend()
        caches: dict[str, list[Attention | RecurrentState]] = {name: [state] for name, state in recurrent.items()}
        for (name, _), call in self._calls.items():
            layer = Attention(
                call.name,
                num_heads=call.num_heads,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.head_dim,
                params=call.params,
                backend=self.backend,
            )
            caches.setdefault(name, []).append(layer)
        self.layers.update({each.layer_name: each for name in self._names for each in caches.get(name, ())})
        self._windows.clear()

    def attend(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: object, scale: float, keywords: dict[str, Any]
    ) -> Tensor:
        """query [1, num_heads, num_tokens, key width] -> [1, num_tokens, num_heads, value width]."""
        nth = self._num_calls[name]
        self._num_calls[name] += 1
        if self._metadata is None:
            self._calls[name, nth] = self._describe(name, nth, query, key, value, mask, scale, keywords)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        call = self._calls[name, nth]
        if not isinstance(mask, Mask):
            raise UnsupportedModelError(f"{name} has made a mask of its own for this step")
        if self._chosen is not None and call.name not in self._chosen:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        layer = self.layers[call.name]
        assert isinstance(layer, Attention)
        assert layer.kv_cache is not None, f"{call.name} has no KV cache yet"
        cache = LayerCache(layer.kv_cache, self._metadata[layer.group_index], call.params)
        query, key, value = (_to_rows(each, call.head_dim) for each in (query, key, value))
        out = self.backend.forward(query, key, value, cache)
        return out[None, :, :, : call.value_dim]

    def _describe(
        self,
        name: str,
        nth: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        scale: float,
        keywords: dict[str, Any],
    ) -> _Call:
        name = f"{name}.{nth}" if nth else name
        soft_cap = keywords.pop("softcap", None)
        sinks = keywords.pop("s_aux", None)
        given_causal = keywords.pop("is_causal", None)
        unknown = [
            key for key, given in keywords.items() if key not in _IGNORED and given is not None and given is not False
        ]
        problem = (
            f"it has keywords that Inflight does not know: {', '.join(unknown)}"
            if unknown
            else f"it is {'not ' if self._is_causal else ''}causal"
            if given_causal is not None and bool(given_causal) != self._is_causal
            else f"its mask is a {type(mask).__name__}, made by the model itself"
            if not isinstance(mask, Mask)
            else f"it has {query.shape[1]} query heads and {key.shape[1]} key heads"
            if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3]
            else f"it has {len(sinks)} sinks for {query.shape[1]} query heads, so they are not divided among ranks"
            if sinks is not None and len(sinks) != query.shape[1]
            else f"it has {query.shape[2]} queries and {key.shape[2]} keys"
            if query.shape[2] != key.shape[2] or len(query) != 1
            else None
        )
        if problem is not None:
            raise UnsupportedModelError(f"the attention of {name} cannot be computed on the KV cache: {problem}")
        assert isinstance(mask, Mask)
        if id(mask) not in self._windows:
            try:
                self._windows[id(mask)] = mask, mask.window(self._max_model_len, is_causal=self._is_causal)
            except (RuntimeError, IndexError, TypeError) as error:
                raise UnsupportedModelError(f"the mask of {name} depends on the tokens ({error})") from error
        widest = max(query.shape[-1], value.shape[-1])
        return _Call(
            name=name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            # padded with zeros, because the C++ kernel needs it
            head_dim=-(-widest // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE,
            value_dim=value.shape[-1],
            dtype=query.dtype,
            params=AttentionParams(
                scale=scale,
                sliding_window=self._windows[id(mask)][1],
                is_causal=self._is_causal,
                soft_cap=soft_cap,
                sinks=None if sinks is None else sinks.detach().float().contiguous(),
            ),
        )


def _is_for_kernel(call: _Call) -> bool:
    return CpuPagedBackend.supports(call.head_dim, BLOCK_SIZE_MULTIPLE, call.dtype, call.dtype)


def _to_rows(heads: Tensor, width: int) -> Tensor:
    """[1, num_heads, num_tokens, any width] -> [num_tokens, num_heads, width], padded with zeros."""
    rows = heads[0].transpose(0, 1)
    if rows.shape[-1] != width:
        rows = F.pad(rows, (0, width - rows.shape[-1]))
    return rows.contiguous()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **keywords: Any,  # each family has its own
) -> tuple[Tensor, None]:
    state, name = _named(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return state.attend(name, query, key, value, attention_mask, scale, keywords), None


def _named(module: nn.Module) -> tuple[PackedAttention, str]:
    """The attention of the model to which the module belongs, and the module's name."""
    found: tuple[PackedAttention, str] = getattr(module, _STATE)
    return found


def _make_mask(*, mask_function: Callable[..., Tensor], use_vmap: bool = False, **_: object) -> Mask:
    return Mask(mask_function, use_vmap)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
