"""`WeightPlan` and `FallbackUnit`: where the tensors of a checkpoint go, and what has memory for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import quantize_rows
from inflight.layers.linear import RowParallelLinear
from inflight.models.transformers_fallback.adapters import Adapter
from inflight.models.transformers_fallback.weights import (
    Checkpoint,
    FallbackUnit,
    WeightPlan,
    make_units,
    missing_weights,
)
from tests.support.model_zoo import FALLBACK_CONFIGS
from tests.unit.layers.contexts import layer_context

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [{EMBEDDING, HEAD}, {EMBEDDING}, {HEAD}])
@pytest.mark.parametrize("do_differ", [False, True])
def test_of_two_equal_weights_one_is_left_unread_and_different_ones_are_both_used(
    stored: set[str], do_differ: bool
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    plan = WeightPlan(model, dict.fromkeys(stored, (32, 16)), lambda one, other: do_differ)
    has_two = do_differ and len(stored) == 2
    [first, *others] = sorted(stored, reverse=True)
    assert plan.renamed == ({EMBEDDING: EMBEDDING, HEAD: HEAD} if has_two else {EMBEDDING: first})
    assert plan.unread == (set(others) if not has_two else set())
    assert plan.tied == (set() if has_two else {HEAD})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (not has_two)
    assert (HEAD in model.all_tied_weights_keys) == (not has_two)


def mixtral() -> Any:
    with torch.device("meta"):
        return MixtralForCausalLM(FALLBACK_CONFIGS["mixtral"][0])


def stored_mixtral() -> dict[str, Tensor]:
    """As a checkpoint has it: the matrices of each expert, and other names than in the model."""
    found = {}
    for name, weight in mixtral().state_dict().items():
        before, _, after = name.partition(".mlp.")
        if "experts" in after:
            for number in range(4):
                for leaf in ("w1", "w3") if "gate_up" in after else ("w2",):
                    shape = (112, 64) if "gate_up" in after else (64, 112)
                    found[f"{before}.block_sparse_moe.experts.{number}.{leaf}.weight"] = torch.randn(shape)
        else:
            found[f"{before}.block_sparse_moe.{after}" if after else name] = torch.randn(weight.shape)
    return found


def test_matrices_of_experts_are_stacked() -> None:
    model, stored = mixtral(), stored_mixtral()
    plan = Checkpoint(
        {name: tuple(each.shape) for name, each in stored.items()}, lambda *_: False, lambda *_: None
    ).plan(model)
    assert plan is not None and Checkpoint(None, lambda *_: False, lambda *_: None).plan(model) is None
    assert set(plan.renamed) | set(plan.converted) == set(model.state_dict())
    assert len(plan.converted) == 4 and not plan.unread
    assert plan.renamed["model.layers.1.mlp.gate.weight"] == "model.layers.1.block_sparse_moe.gate.weight"
    experts = "model.layers.1.mlp.experts"
    for _ in range(2):  # also for a unit that is loaded once more
        plan = WeightPlan(model, {name: tuple(each.shape) for name, each in stored.items()}, lambda *_: False)
        found = plan.convert(f"{experts}.gate_up_proj", stored)
        rows = [
            torch.cat(
                [stored[f"model.layers.1.block_sparse_moe.experts.{number}.{leaf}.weight"] for leaf in ("w1", "w3")]
            )
            for number in range(4)
        ]
        assert found[f"{experts}.gate_up_proj"].equal(torch.stack(rows))
    assert plan.shape("model.layers.1.block_sparse_moe.experts.3.w1.weight") == (112, 64)


def test_weights_without_a_tensor_are_missing_and_tensors_without_a_weight_are_left_over() -> None:
    model, stored = mixtral(), stored_mixtral()
    shapes = {
        name: tuple(each.shape) for name, each in stored.items() if "layers.0." not in name or "experts" not in name
    }
    model._keys_to_ignore_on_load_missing = [r"layers\.1\.input_layernorm", r"never"]
    model._keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq$"]
    for name in ("model.layers.1.input_layernorm.weight", "model.norm.weight"):
        del shapes[name]
    surplus = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "model.layers.0.self_attn.other.weight": (8,)}
    plan = WeightPlan(model, shapes | surplus, lambda *_: False)
    units = make_units(model, "model.layers", 0, 2, plan)
    experts = [f"model.layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    assert missing_weights(units, plan, model) == [*experts, "model.norm.weight"]
    assert plan.unread == {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert not set(surplus) & set(plan.renamed.values())


def test_units_are_the_layers_and_the_rest() -> None:
    units = make_units(mixtral(), "model.layers", 1, 1, None)
    assert [name for name, _ in units] == ["model.layers.1", ""]
    layer, rest = ({name for name, _ in unit.targets()} for _, unit in units)
    assert all(name.startswith("model.layers.1.") for name in layer) and len(layer) == 9
    assert {name for name in rest if ".layers.0." not in name} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    }  # fmt: skip


class Block(nn.Module):
    """One of everything: a tied weight, tables that are stored and those that are not, a number, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.one, self.other = nn.Linear(4, 3, dtype=torch.bfloat16), nn.Linear(4, 3, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(4)
            self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), False)
        self.other.weight = self.one.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("computed", torch.ones(2), persistent=False)


def unit_of(block: nn.Module, plan: Any = None) -> FallbackUnit:
    model: Any = nn.ModuleDict({"block": block})
    return FallbackUnit(model, "block", (), plan)


def test_weights_get_memory_once_and_are_listed_once() -> None:
    block = Block()
    unit = unit_of(block)
    unit.allocate(torch.device("cpu"))
    assert block.one.weight is block.other.weight and not any(each.is_meta for each in block.parameters())
    first = block.one.weight
    unit.allocate(torch.device("cpu"))
    assert block.one.weight is first and not first.requires_grad
    slots = dict(unit.weight_slots("unused"))
    assert list(slots) == [
        "block.count", "block.kept", "block.one.weight", "block.one.bias", "block.other.bias", "block.norm.weight",
        "block.norm.bias",
    ]  # fmt: skip
    assert [name for name, slot in slots.items() if slot.is_scale] == ["block.norm.weight"]
    assert slots["block.one.weight"].shape == (3, 4) and slots["block.one.weight"].destination.dtype == torch.bfloat16
    slots["block.kept"].destination.fill_(7)
    assert block.get_buffer("kept").tolist() == [7, 7]


def test_weights_are_float32_for_a_while_and_then_freed() -> None:
    block = Block()
    unit = unit_of(block)
    unit.allocate(torch.device("cpu"))
    with torch.no_grad():
        for each in block.parameters():
            each.fill_(3)
    dtypes = {name: each.dtype for name, each in block.named_parameters()}
    unit.to_float32()
    assert {each.dtype for each in block.parameters()} == {torch.float32, torch.int64}
    assert block.one.weight is block.other.weight and block.count.dtype == torch.int64
    unit.to_own_dtypes()
    assert {name: each.dtype for name, each in block.named_parameters()} == dtypes
    assert all((each == 3).all() for each in block.parameters())
    unit.to_float32()
    unit.free()
    assert {name: each.dtype for name, each in block.named_parameters()} == dtypes
    assert all(each.is_meta for each in block.parameters()) and block.one.weight is block.other.weight
    unit.allocate(torch.device("cpu"))
    assert block.one.weight.shape == (3, 4) and not block.one.weight.is_meta


class Halves:
    """A plan that makes one matrix of two tensors."""

    renamed: dict[str, str]
    tied: set[str]

    def __init__(self, target: str, shape: tuple[int, ...]) -> None:
        self.renamed, self.tied, self._shape = {}, set(), shape
        self.converted = {target: (None, [("a", "upper"), ("b", "lower")])}

    def shape(self, source: str) -> tuple[int, ...]:
        return self._shape

    def convert(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.cat([parts["upper"], parts["lower"]])}


@pytest.mark.parametrize("is_quantized", [False, True])
def test_tensors_that_become_one_weight_are_kept_until_then(is_quantized: bool) -> None:
    linear = RowParallelLinear(64, 32, bias=False, context=layer_context(torch.float32))
    unit = unit_of(Adapter(linear), Halves("block.weight", (16, 64)))
    unit.allocate(torch.device("cpu"))
    assert [name for name, _ in unit.targets()] == ["block.weight"]
    halves = {"upper": torch.randn(16, 64), "lower": torch.randn(16, 64)}
    parts: dict[str, Any] = dict(halves)
    if is_quantized:
        parts = {name: quantize_rows(each, bits=8, group_size=0) for name, each in halves.items()}
        halves = {name: each.dequantize() for name, each in parts.items()}
    for name, slot in unit.weight_slots("block"):
        assert slot.shape == (16, 64) and slot.destination.is_meta and slot.accept is not None
        assert slot.accept(parts[name])
    unit.finish_loading()
    assert not unit.parts
    x = torch.randn(5, 64)
    torch.testing.assert_close(linear(x), x @ torch.cat([halves["upper"], halves["lower"]]).T, rtol=1e-4, atol=1e-4)


def test_tensors_may_become_a_weight_of_transformers_own_module() -> None:
    linear = nn.Linear(64, 32, bias=False)
    unit = unit_of(linear, Halves("block.weight", (16, 64)))
    unit.parts = {"upper": torch.full((16, 64), 3.0), "lower": torch.full((16, 64), 4.0)}
    with torch.no_grad():
        unit.finish_loading()
    assert linear.weight[:, 0].tolist() == [3.0] * 16 + [4.0] * 16


def test_a_converted_weight_of_another_shape_is_refused() -> None:
    unit = unit_of(nn.Linear(64, 32), Halves("block.weight", (8, 64)))
    unit.parts = {"upper": torch.zeros(8, 64), "lower": torch.zeros(8, 64)}
    with pytest.raises(CheckpointError, match=r"block.weight .*\[16, 64\].*\[32, 64\]"):
        unit.finish_loading()


def test_only_a_plan_says_where_tensors_go() -> None:
    plan: Any = SimpleNamespace(renamed={"block.bias": "stored.bias"}, converted={}, tied=set())
    unit = unit_of(nn.Linear(4, 3), plan)
    assert [(name, slot.shape) for name, slot in unit.weight_slots("block")] == [("stored.bias", (3,))]
