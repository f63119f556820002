"""`PackedAttention`: what is recorded of a layer's attention, how it is computed on the cache, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from inflight.attention.backend import AttentionBackend
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.errors import UnsupportedModelError
from inflight.kernels.cpu.library import load_kernels
from inflight.layers.attention import Attention
from inflight.models.transformers_fallback.attention import NAME, Mask, PackedAttention

MAX_MODEL_LEN = 64
Visible = Callable[[Any, Any, Any, Any], Any]


def causal(_: Any, __: Any, query: Any, key: Any) -> Any:
    return key <= query


def within(window: int) -> Visible:
    return lambda _, __, query, key: (key <= query) & (key > query - window)


def mask(visible: Visible = causal, **more: Any) -> Any:
    """As transformers makes it."""
    return AttentionMaskInterface()[NAME](mask_function=visible, batch_size=1, **more)


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


class Heads:
    """Queries, keys and values of a row of tokens."""

    def __init__(
        self,
        num_tokens: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 20,
        value_width: int = 12,
        dtype: Any = None,
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=torch.Generator().manual_seed(sum(shape))).to(
                dtype or torch.float32
            )

        self.query = drawn(heads, num_tokens, width)
        self.key, self.value = drawn(kv_heads, num_tokens, width), drawn(kv_heads, num_tokens, value_width)

    def of(self, *tokens: int) -> Heads:
        part = copy.copy(self)
        part.query, part.key, part.value = (each[:, :, list(tokens)] for each in (self.query, self.key, self.value))
        return part

    def attend(self, module: nn.Module, mask: object, scaling: float | None = None, **more: Any) -> Tensor:
        found, weights = AttentionInterface()[NAME](module, self.query, self.key, self.value, mask, scaling, **more)
        assert weights is None
        result: Tensor = found
        return result

    def truth(self, scale: float, window: int) -> Tensor:
        """[1, num_tokens, num_heads, value width]"""
        age = torch.arange(self.query.shape[2])[:, None] - torch.arange(self.query.shape[2])
        keys, values = (
            each.repeat_interleave(self.query.shape[1] // each.shape[1], 1) for each in (self.key, self.value)
        )
        scores = (self.query @ keys.mT * scale).masked_fill((age < 0) | (age >= window), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2)


def test_what_is_recorded() -> None:
    """Layers are in the order of the model. Heads are padded, because the kernel needs multiples of 16."""
    model = llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    attention = PackedAttention(model, TorchSdpaBackend(), MAX_MODEL_LEN)
    sinks = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]], dtype=torch.bfloat16)[:, 0]
    found: list[Tensor] = []

    def run() -> None:
        found.append(Heads(5).attend(second, mask(), 0.5, softcap=3.0, s_aux=sinks, dropout=0.5, sliding_window=7))
        found.append(Heads(5).attend(first, mask(within(9)), is_causal=True, unused=None, other=False))
        found.append(Heads(5, heads=6, kv_heads=6, width=16, value_width=24).attend(first, mask()))

    for _ in range(2):  # a second recording takes the place of the first
        attention.record(run)
    assert all(torch.equal(each, torch.zeros(1, 5, *each.shape[2:])) for each in found)
    assert [tuple(each.shape[2:]) for each in found[:3]] == [(4, 12), (4, 12), (6, 24)]
    name = "model.layers.0.self_attn"
    assert list(attention.layers) == [name, f"{name}.1", "model.layers.1.self_attn"]
    layers: list[Any] = list(attention.layers.values())
    assert [layer.layer_name for layer in layers] == list(attention.layers)
    assert all(isinstance(layer, Attention) and layer.backend is attention.backend for layer in layers)
    assert [(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers] == [
        (4, 2, 32),
        (6, 6, 32),
        (4, 2, 32),
    ]
    params = [layer.params for layer in layers]
    assert [each.scale for each in params] == [20**-0.5, 0.25, 0.5]
    assert [each.sliding_window for each in params] == [9, None, None]
    assert [each.soft_cap for each in params] == [None, None, 3.0]
    assert params[0].sinks is params[1].sinks is None and params[2].sinks.tolist() == [1, 2, 3, 4]
    assert params[2].sinks.dtype == torch.float32 and params[2].sinks.is_contiguous()
    assert all(each.value_dim is None for each in params)


def test_a_step_of_two_sequences() -> None:
    """Values are narrower than keys, two query heads share a key, and the layer attends twice in one forward."""
    model, backend = llama(), TorchSdpaBackend()
    module = model.model.layers[1].self_attn
    attention = PackedAttention(model, backend, MAX_MODEL_LEN)
    one, other = Heads(9), Heads(6)

    def run(heads: Heads) -> list[Tensor]:
        return [heads.attend(module, mask(within(4)), 0.5), heads.attend(module, mask(), 0.25)]

    attention.record(lambda: run(one))
    windowed, whole = attention.layers.values()
    arenas = []
    for group, layer in enumerate((windowed, whole)):
        spec = layer.kv_cache_spec(16, torch.float32)
        arenas.append(torch.zeros(4, spec.block_bytes, dtype=torch.uint8))
        layer.bind(backend.layer_cache(arenas[-1], spec, 0), 1 - group)

    def metadata(starts: list[int], computed: list[int], lengths: list[int], layer: Any) -> AttentionMetadata:
        arrays = (np.array(each, dtype=np.int32) for each in (starts, lengths, computed, [[3], [1]]))
        inputs = AttentionInputs(
            **dict(zip(("query_start_loc", "seq_lens", "num_computed_tokens", "block_table"), arrays, strict=True))
        )
        return backend.metadata_builder(layer.kv_cache_spec(16, torch.float32))(inputs)

    found: list[list[Tensor]] = []
    for starts, computed, lengths in (
        ([0, 5, 7], [0, 0], [5, 2]),
        ([0, 1, 5], [5, 2], [6, 6]),
        ([0, 3, 3], [6, 6], [9, 6]),
    ):
        packed = Heads(0)
        for name in ("query", "key", "value"):
            parts = (
                getattr(each, name)[:, :, start:stop]
                for each, start, stop in zip((one, other), computed, lengths, strict=True)
            )
            setattr(packed, name, torch.cat(list(parts), 2))
        with attention.step(
            (metadata(starts, computed, lengths, whole), metadata(starts, computed, lengths, windowed))
        ):
            results = run(packed)
        pieces = [torch.split(each, np.diff(starts).tolist(), 1) for each in results]
        found.append([piece for both in pieces for piece in both])
    for number, (heads, scale, window) in enumerate(
        ((one, 0.5, 4), (other, 0.5, 4), (one, 0.25, 99), (other, 0.25, 99))
    ):
        torch.testing.assert_close(torch.cat([each[number] for each in found], 1), heads.truth(scale, window))

    arenas[0].zero_(), arenas[1].zero_()
    with attention.step(
        (metadata([0, 9, 9], [0, 0], [9, 0], whole), metadata([0, 9, 9], [0, 0], [9, 0], windowed)), [1]
    ):
        results = run(one)
    assert results[0].shape == (1, 9, 4, 12) and not results[0].any() and not arenas[0].any()
    torch.testing.assert_close(results[1], one.truth(0.25, 99))
    with attention.step(()), pytest.raises(UnsupportedModelError, match=r"layers.1.self_attn has made a mask"):
        one.attend(module, None)
    attention.record(lambda: found.append([one.attend(module, mask())]))  # a step is no longer open
    assert list(attention.layers) == ["model.layers.1.self_attn"] and not found[-1][0].any()


@pytest.mark.parametrize(
    ("heads", "given", "message"),
    [
        (
            Heads(5),
            {"bias": 1.0, "cache_position": None, "extra": True},
            "it has keywords that Inflight does not know: bias, extra",
        ),
        (Heads(5), {"is_causal": False}, "it is not causal"),
        (Heads(5), {"mask": None}, "its mask is a NoneType, made by the model itself"),
        (Heads(5), {"mask": torch.zeros(5, 5)}, "its mask is a Tensor, made by the model itself"),
        (Heads(5, heads=5), {}, "it has 5 query heads and 2 key heads"),
        (Heads(5), {"s_aux": torch.zeros(8)}, "it has 8 sinks for 4 query heads, so they are not divided among ranks"),
        (Heads(5), {"mask": mask(lambda _, __, query, key: key >= 0 * query)}, "neither causal nor a sliding window"),
        (
            Heads(5),
            {"mask": mask(lambda _, __, query, key: torch.ones(5, dtype=torch.bool)[key] & (key <= query))},
            "the mask of model.layers.0.self_attn depends on the tokens",
        ),
    ],
    ids=range(8),
)
def test_what_would_be_computed_differently_is_refused(heads: Heads, given: dict[str, Any], message: str) -> None:
    model, given = llama(), {"mask": mask(), **given}
    with pytest.raises(UnsupportedModelError, match=message):
        PackedAttention(model, TorchSdpaBackend(), MAX_MODEL_LEN).record(
            lambda: heads.attend(model.model.layers[0].self_attn, given.pop("mask"), **given)
        )


@pytest.mark.parametrize("changed", ["keys", "values", "rows"])
def test_other_shapes_are_refused(changed: str) -> None:
    model, heads = llama(), Heads(5)
    if changed == "keys":  # those of tokens before this step
        heads.key, heads.value, message = Heads(7).key, Heads(7).value, "it has 5 queries and 7 keys"
    elif changed == "values":
        heads.value, message = Heads(5, kv_heads=1).value, "it has 4 query heads and 2 key heads"
    else:
        heads.query, heads.key, heads.value = (
            each.repeat(2, 1, 1, 1) for each in (heads.query, heads.key, heads.value)
        )
        message = "it has 5 queries and 5 keys"
    with pytest.raises(UnsupportedModelError, match=message):
        PackedAttention(model, TorchSdpaBackend(), MAX_MODEL_LEN).record(
            lambda: heads.attend(model.model.layers[0].self_attn, mask())
        )


class Counting(nn.Module):
    def forward(self, heads: Heads) -> Tensor:
        torch.arange(5)
        return heads.attend(self, mask())


class Quiet(nn.Module):
    def forward(self, heads: Heads) -> Tensor:
        torch.ones(5)
        return heads.attend(self, mask())


class Other(nn.Module):
    def forward(self) -> Tensor:
        return torch.arange(5)


def test_a_layer_that_counts_positions_from_the_beginning_of_the_row_is_refused() -> None:
    model = llama()
    model.model.layers[0].self_attn, model.model.layers[1].self_attn = Quiet(), Counting()
    model.model.rotary_emb = Other()
    attention = PackedAttention(model, TorchSdpaBackend(), MAX_MODEL_LEN)

    def run() -> None:
        model.model.rotary_emb()  # has no attention
        Other()()  # is no part of the model
        Heads(5).attend(model.model.layers[0].self_attn, mask())

    attention.record(run)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1.self_attn counts"):
        attention.record(lambda: model.model.layers[1].self_attn(Heads(5)))


def test_the_kernel_computes_all_layers_or_none() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C++ kernels here")
    model, given = llama(), CpuPagedBackend(kernels)
    attention = PackedAttention(model, given, MAX_MODEL_LEN)
    for dtypes, is_for_kernel in (
        ((torch.float32, torch.float32), True),
        ((torch.float32, torch.float64), False),
        ((torch.float64, torch.float32), False),
    ):
        attention = PackedAttention(model, given, MAX_MODEL_LEN)
        attention.record(
            lambda dtypes=dtypes: [  # type: ignore[misc]
                Heads(5, dtype=dtype).attend(layer.self_attn, mask())
                for layer, dtype in zip(model.model.layers, dtypes, strict=True)
            ]
        )
        assert (attention.backend is given) == is_for_kernel
        assert all(layer.backend is attention.backend for layer in attention.layers.values())


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_model_len", [1, 2, 64, 333])
@pytest.mark.parametrize("window", [1, 2, 7, 63, 64, 65, 332, 333, 500])
def test_windows_are_read(window: int, max_model_len: int) -> None:
    assert mask(within(window)).window(max_model_len) == (window if window < max_model_len else None)
    assert mask().window(max_model_len) is None


@pytest.mark.parametrize("use_vmap", [None, False, True])
def test_a_function_for_single_positions_is_called_with_them(use_vmap: bool | None) -> None:
    found: list[int] = []

    def visible(_: Any, __: Any, query: Any, key: Any) -> Any:
        found.append(key.dim())
        return key <= query

    more = {} if use_vmap is None else {"use_vmap": use_vmap}
    assert mask(visible, **more).window(MAX_MODEL_LEN) is None
    assert (set(found) == {0}) == bool(use_vmap)


@pytest.mark.parametrize(
    "visible",
    [
        lambda _, __, query, key: key >= 0 * query,  # every token sees all
        lambda _, __, query, key: (key <= query) & (key // 64 == query // 64),  # chunks
        lambda _, __, query, key: (key <= query) & (key != 5),
        lambda _, __, query, key: (key <= query) | ((query == 0) & (key == 1)),  # a look ahead at the begin
        lambda _, __, query, key: (key <= query) & ((key > query - 100) | (query < 101)),  # the first one is wider
        lambda _, __, query, key: (key <= query) & ((query < 332) | (key > 100)),  # only the last one is narrower
    ],
)
def test_other_masks_are_refused(visible: Visible) -> None:
    with pytest.raises(UnsupportedModelError, match=r"sliding window \(position \d+, max_model_len=333\)"):
        mask(visible).window(333)


@pytest.mark.parametrize(
    ("window", "positions"),
    [(500, (0, 1, 2, 3, 5, 7, 127, 128, 129, 255, 257, 332)), (10, (0, 1, 9, 10, 11, 19, 21, 161, 319, 321))],
)
def test_one_position_that_is_different_is_found_where_families_change_their_masks(
    window: int, positions: tuple[int, ...]
) -> None:
    """Around the window, powers of two, and the products of both."""
    for position in positions:

        def visible(_: Any, __: Any, query: Any, key: Any, different: int = position) -> Any:
            return within(window)(0, 0, query, key) & ~((query == different) & (key == different))

        with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
            mask(visible).window(333)


def test_a_mask_may_be_cut_and_moved_but_not_computed_with() -> None:
    given = mask()
    assert isinstance(given, Mask) and given[:, :, :5] is given and given.to(torch.float32, device="cpu") is given
    assert not hasattr(given, "__len__")
    computations: list[Callable[[Any], object]] = [
        lambda each: each + 1,
        lambda each: 1 * each,
        lambda each: ~each,
        lambda each: each & True,
        lambda each: each.shape,
        lambda each: each.bool(),
    ]
    for compute in computations:
        with pytest.raises(UnsupportedModelError, match="computes with its mask"):
            compute(given)
    tensor: Any = torch.zeros(2)
    with pytest.raises(UnsupportedModelError, match=r"torch's masked_fill"):
        tensor.masked_fill(given, 0.0)


def test_two_models_with_one_backend_have_their_own_layers() -> None:
    """Each model has its own layers, also those with the same names."""
    backend: AttentionBackend = TorchSdpaBackend()
    models = [llama(), llama()]
    found = [PackedAttention(model, backend, MAX_MODEL_LEN) for model in models]
    found[0].record(lambda: Heads(5).attend(models[0].model.layers[0].self_attn, mask()))
    assert len(found[0].layers) == 1 and not found[1].layers
