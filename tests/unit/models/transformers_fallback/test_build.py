"""`build`: what transformers reads and makes, without memory for weights, and which of its layers become Inflight's."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Ernie4_5_MoeConfig,
    FalconConfig,
    Gemma3Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import UnsupportedModelError
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.models.transformers_fallback.adapters import Adapter, HeadAdapter
from inflight.models.transformers_fallback.build import (
    build,
    find_layers,
    is_kept,
    read_config,
    replace_head,
    replace_linears,
    warn_of_unknown_overrides,
)
from tests.support.model_zoo import FALLBACK_CONFIGS, VOCAB_SIZE
from tests.unit.layers.contexts import layer_context
from tests.unit.models.transformers_fallback.fallback_models import load, model_config
from tests.unit.models.transformers_fallback.test_modules import LargestMLP

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FLOAT32 = layer_context(torch.float32)


def saved(folder: Path, config: PreTrainedConfig | None = None, **more: object) -> Path:
    (config or LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return folder


# ---- config.json -----------------------------------------------------------------------------------------------------


def test_overrides_change_what_transformers_reads(tmp_path: Path) -> None:
    config = model_config(saved(tmp_path))
    assert read_config(config).hidden_act == "silu"
    changed = read_config(replace(config, config_overrides={"hidden_act": "gelu", "rope_theta": 77.0}))
    assert isinstance(changed, LlamaConfig) and changed.hidden_act == "gelu" and changed.hidden_size == 32
    assert changed.rope_parameters["rope_theta"] == 77.0
    other = read_config(replace(config, config_overrides={"model_type": "granite", "logits_scaling": 3.0}))
    assert isinstance(other, GraniteConfig) and other.logits_scaling == 3.0 and other.hidden_size == 32
    assert read_config(config).hidden_act == "silu"


@pytest.mark.parametrize(("architectures", "is_known"), [(["HouseForCausalLM"], False), (["LlamaForCausalLM"], True)])
def test_a_configuration_that_transformers_cannot_read(
    tmp_path: Path, architectures: list[str], is_known: bool
) -> None:
    folder = saved(tmp_path, architectures=architectures, model_type="house_brand")
    config = model_config(folder)
    config = replace(config, architecture=replace(config.architecture, not_native="it has gills"))
    with pytest.raises(UnsupportedModelError, match=r"transformers \d[\d.]+ cannot read") as refusal:
        read_config(config)
    assert (f"{architectures[0]} is not one of Inflight's own families" in str(refusal.value)) != is_known
    assert str(refusal.value).startswith("config.json: ") and str(refusal.value).endswith("it has gills")
    assert "house_brand" in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(UnsupportedModelError, match="cannot read this configuration"):
        read_config(replace(model_config(saved(tmp_path / "llama")), config_overrides={"model_type": "house_brand"}))


def test_code_of_the_model_is_run_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers copies the code to this folder and imports it from there; otherwise it is in the user's cache
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    auto_map = {"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"}
    folder = saved(tmp_path, architectures=["HouseForCausalLM"], model_type="house_brand", auto_map=auto_map)
    (folder / "house.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class HouseConfig(LlamaConfig):\n    model_type = 'house_brand'\n"
        "class HouseForCausalLM(LlamaForCausalLM):\n    config_class = HouseConfig\n"
    )
    config = model_config(folder)
    with pytest.raises(UnsupportedModelError, match=r"HouseForCausalLM; .*--trust-remote-code"):
        read_config(config)
    trusted = replace(config, trust_remote_code=True)
    assert type(build(trusted, FLOAT32)).__name__ == "HouseForCausalLM"
    changed = read_config(replace(trusted, config_overrides={"hidden_act": "gelu"}))
    assert type(changed).__name__ == "HouseConfig" and changed.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("overrides", "unknown"),
    [
        ({}, None),
        ({"hidden_size": 32, "n_embd": 32, "rope_theta": 5.0, "rope_scaling": None, "torch_dtype": "float32"}, None),
        ({"hidden_act": "gelu", "own_field": 1, "chunk_size_feed_forward": 0}, None),
        ({"hidden_akt": "gelu", "hidden_act": "gelu", "rope_teta": 5.0}, "hidden_akt, rope_teta"),
    ],
)
def test_unknown_overrides_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: dict[str, Any], unknown: str | None
) -> None:
    config = replace(model_config(saved(tmp_path, own_field=0)), config_overrides=overrides)
    with caplog.at_level(logging.WARNING, "inflight"):
        warn_of_unknown_overrides(config)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (
        [] if unknown is None else [f"hf_overrides: transformers' configuration of LlamaForCausalLM has no {unknown}"]
    )


@pytest.mark.parametrize(("rank", "stage"), [(0, (1, 2, 2)), (1, (1, 2, 2)), (0, (0, 1, 2))])
def test_one_rank_tells_of_unknown_overrides(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    stage: tuple[int, int, int],
) -> None:
    """The first one of the last stage."""
    monkeypatch.setattr("inflight.models.transformers_fallback.model.check", lambda *_: None)
    tp, overrides = TensorParallelGroup(2, rank), {"hidden_akt": "gelu"}
    with caplog.at_level(logging.WARNING, "inflight"):
        load(saved(tmp_path), load_format="dummy", tp=tp, stage=PipelineStage(*stage), config_overrides=overrides)
    is_told = any("hidden_akt" in record.getMessage() for record in caplog.records)
    assert is_told == (rank == 0 and stage == (1, 2, 2))


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("config", "always", "in_float16"),
    [
        (FALLBACK_CONFIGS["gpt_oss"][0], (), ("norm",)),
        (
            Ernie4_5_MoeConfig(**SIZES, moe_intermediate_size=32, moe_num_experts=4, moe_k=2, tie_word_embeddings=True),
            ("gate.weight", "moe_statics"),
            (),
        ),
    ],
    ids=["gpt_oss", "ernie"],
)
def test_weights_have_no_memory_and_their_dtypes(
    tmp_path: Path, config: PreTrainedConfig, always: tuple[str, ...], in_float16: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Some weights transformers keeps in float32, others only where the engine's dtype would be float16."""
    model: Any = build(model_config(saved(tmp_path, config)), layer_context(dtype))
    names = (*always, *(in_float16 if dtype == torch.float16 else ()))
    for name, weight in model.named_parameters():
        assert weight.is_meta and not weight.requires_grad
        assert weight.dtype == (torch.float32 if any(each in name for each in names) else dtype), name
    assert not model.training and model.config.dtype == dtype and model.config._attn_implementation == "inflight"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(config.tie_word_embeddings)
    table = model.model.rotary_emb.inv_freq
    assert table.device.type == "cpu" and table.dtype == torch.float32 and table.is_contiguous() and table.any()
    assert build(model_config(tmp_path), layer_context(dtype), "eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_always_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    model = build(model_config(saved(tmp_path)), layer_context(dtype))
    kept = [name for name, weight in model.named_parameters() if weight.dtype != dtype]
    assert kept == [f"model.layers.{number}.input_layernorm.weight" for number in (0, 1)]
    assert all(model.get_parameter(name).dtype == torch.float32 for name in kept)


def test_a_model_that_also_reads_images(tmp_path: Path) -> None:
    """Its configuration has one of the text and one of the images."""
    text = {**SIZES, "num_hidden_layers": 1, "head_dim": 8}
    images = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config={**images, "num_hidden_layers": 1}, mm_tokens_per_image=4)
    model = build(model_config(saved(tmp_path, config)), layer_context(torch.bfloat16))
    assert {each.dtype for each in (model.config, model.config.text_config, model.config.vision_config)} == {
        torch.bfloat16
    }
    assert find_layers(model)[0] == "model.language_model.layers"


def test_tables_of_the_checkpoint_get_memory_and_computed_ones_need_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, make = model_config(saved(tmp_path)), LlamaForCausalLM.__init__
    is_persistent = True

    def changed(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.register_buffer("stored", torch.empty(3, dtype=torch.int32), persistent=is_persistent)
        self.model.register_buffer("computed", torch.ones(2), persistent=False)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", changed)
    model = build(config, layer_context(torch.bfloat16))
    stored = model.get_buffer("stored")
    assert stored.device.type == "cpu" and stored.shape == (3,) and stored.dtype == torch.int32
    assert model.get_buffer("model.computed").tolist() == [1, 1] and "computed" not in model.state_dict()
    is_persistent = False
    with pytest.raises(UnsupportedModelError, match=r"table \.?stored"):
        build(config, layer_context(torch.bfloat16))


def test_a_model_that_cannot_be_built_is_refused_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(
        saved(tmp_path / "falcon", FalconConfig(vocab_size=50, hidden_size=32, num_attention_heads=4))
    )
    config = replace(config, architecture=replace(config.architecture, not_native="it has gills"))
    with pytest.raises(UnsupportedModelError, match=r"causal LM .*it has gills$"):
        build(config, FLOAT32)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "__init__", fail)
    for error in (ValueError("bad luck"), KeyError("other")):
        with pytest.raises(
            UnsupportedModelError, match=rf"LlamaForCausalLM .*: {type(error).__name__}: '?{error.args[0]}"
        ):
            build(model_config(saved(tmp_path / "llama")), FLOAT32)


def test_names_of_weights_that_stay_float32() -> None:
    kept = {"norm", "gate.weight"}
    assert all(
        is_kept(name, kept) for name in ("norm.weight", "a.norm", "a.norm.weight", "mlp.gate.weight", "gate.weight")
    )
    assert not any(
        is_kept(name, kept) for name in ("a.input_norm.weight", "norms", "gate.weights", "gateXweight", "a.b")
    )
    assert not is_kept("norm", set())


# ---- its layers ------------------------------------------------------------------------------------------------------


def blocks(count: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(width, width)])}) for _ in range(count))


class Decoder(nn.Module):
    def __init__(self, **lists: nn.ModuleList) -> None:
        super().__init__()
        for name, each in lists.items():
            self.add_module(name, each)


@pytest.mark.parametrize(
    ("inside", "outside", "wanted"),
    [
        ({"layers": blocks(2)}, {}, "decoder.layers"),
        ({"layers": blocks(2), "layers_of_tokens": blocks(3, 90)}, {}, "decoder.layers"),  # not those with most weights
        ({"others": blocks(3), "blocks": blocks(4, 8)}, {"images": blocks(5, 99)}, "decoder.blocks"),
        ({"blocks": blocks(2)}, {"images": blocks(2, 99)}, "decoder.blocks"),
        ({}, {"first": blocks(3), "second": blocks(3, 5)}, "second"),
    ],
)
def test_the_decoder_layers_are_found(
    inside: dict[str, nn.ModuleList], outside: dict[str, nn.ModuleList], wanted: str
) -> None:
    """By their number, by where they are, then by their size."""
    model: Any = Decoder(**outside)
    model.decoder = Decoder(**inside)
    model.config, model.get_decoder = LlamaConfig(**SIZES), lambda: model.decoder
    name, layers = find_layers(model)
    assert name == wanted and layers is model.get_submodule(wanted)


def test_a_model_without_layers_is_refused() -> None:
    model: Any = nn.ModuleDict({"one": nn.Linear(2, 2)})
    with pytest.raises(UnsupportedModelError, match="ModuleDict has no list of decoder layers"):
        find_layers(model)


def qwen3_moe(**more: Any) -> Any:
    moe = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "head_dim": 8,
    }
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **moe, **more}))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_linear_layers_of_a_plan_are_divided(num_ranks: int) -> None:
    model = qwen3_moe()
    replace_linears(model, "model.layers", layer_context(torch.float32, TensorParallelGroup(num_ranks, 0)))
    found = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    own = {name.removeprefix("model.layers.1."): each.inner for name, each in found.items() if ".layers.1." in name}
    assert own.keys() == {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    queries, outputs = own["self_attn.q_proj"], own["self_attn.o_proj"]
    assert isinstance(queries, ColumnParallelLinear)
    assert {name: part.size for name, part in queries.parts.items()} == {
        "q_proj": 32 // num_ranks, "k_proj": 16 // num_ranks, "v_proj": 16 // num_ranks
    }  # fmt: skip
    assert all(isinstance(each, RowParallelLinear) == (num_ranks == 2) for each in (outputs, own["mlp.down_proj"]))
    assert isinstance(outputs, RowParallelLinear | ColumnParallelLinear) and outputs.in_features == 32 // num_ranks
    gate = own["mlp.gate_proj"]
    assert isinstance(gate, ColumnParallelLinear) and [part.size for part in gate.parts.values()] == [48 // num_ranks]
    assert type(model.lm_head) is nn.Linear
    [(_, down)] = own["mlp.down_proj"].weight_slots("down")
    assert down.shape == (32, 48) and down.destination.shape == (32, 48 // num_ranks)


def test_an_mlp_that_needs_its_whole_width_is_not_divided() -> None:
    model = qwen3_moe()
    model.model.layers[1].mlp = LargestMLP(LlamaConfig(**SIZES))
    replace_linears(model, "model.layers", layer_context(torch.float32, TensorParallelGroup(2, 0)))
    mlp, attention = model.model.layers[1].mlp, model.model.layers[1].self_attn
    for name, size in (("gate_proj", 48), ("up_proj", 48), ("down_proj", 32)):
        inner = getattr(mlp, name).inner
        assert isinstance(inner, ColumnParallelLinear) and [part.size for part in inner.parts.values()] == [size]
    assert isinstance(attention.o_proj.inner, RowParallelLinear)


def test_projections_that_are_not_alike_stay_apart() -> None:
    model = qwen3_moe()
    attention = model.model.layers[0].self_attn
    attention.k_proj = nn.Linear(32, 16, bias=True, device="meta")
    replace_linears(model, "model.layers", FLOAT32)
    inner = [getattr(attention, name).inner for name in ("q_proj", "k_proj", "v_proj")]
    assert [list(each.parts) for each in inner] == [["q_proj"], ["k_proj"], ["v_proj"]]
    assert [name for name, _ in inner[1].weight_slots("a.k_proj")] == ["a.k_proj.weight", "a.k_proj.bias"]
    assert [name for name, _ in inner[0].weight_slots("a.q_proj")] == ["a.q_proj.weight"]


def test_a_model_without_a_plan_is_not_divided() -> None:
    model: Any = nn.Module()
    model.tp_plan, context = {"layers.*": "ep_router"}, layer_context(torch.float32, TensorParallelGroup(2, 0))
    with pytest.raises(UnsupportedModelError, match=r"Module: .*no plan"):
        replace_linears(model, "layers", context)
    model.tp_plan = {"layers.*": "rowwise"}
    replace_linears(model, "layers", context)
    model.tp_plan = {}
    replace_linears(model, "layers", FLOAT32)


# ---- its head --------------------------------------------------------------------------------------------------------


class ReadingHead(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = hidden @ self.lm_head.weight.T
        return logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_head_becomes_inflights(is_tied: bool, has_bias: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))
    if has_bias:
        model.lm_head.bias = nn.Parameter(torch.randn(50), False)
    hidden = torch.randn(1, 3, 32)
    wanted, weight = model.lm_head(hidden).detach(), model.lm_head.weight.data
    replace_head(model, FLOAT32)
    head = model.lm_head
    assert isinstance(head, HeadAdapter)
    slots = dict(head.inner.weight_slots("lm_head"))
    assert list(slots) == ([] if is_tied else ["lm_head.weight"])
    for slot in slots.values():
        slot.destination.copy_(weight)
    head.inner.finish_loading()
    torch.testing.assert_close(head(hidden), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dtype", "read", "none", "other"])
def test_other_heads_stay(kind: str) -> None:
    model = (ReadingHead if kind == "read" else LlamaForCausalLM)(LlamaConfig(**SIZES))
    if kind == "none":
        model = model.model
    elif kind == "other":
        model.lm_head = nn.Sequential(nn.Linear(32, 50))
    head = model.get_output_embeddings()
    replace_head(model, layer_context(torch.bfloat16) if kind == "dtype" else FLOAT32)
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_rows_of_a_tied_head(rank: int) -> None:
    """The last rank has rows of padding if the vocabulary cannot be divided."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCAB_SIZE}, tie_word_embeddings=True))
    group: Any = TensorParallelGroup(2, rank)
    group.all_gather = lambda x, dim=-1: torch.cat([x, x], dim)
    table = model.model.embed_tokens.weight.data
    replace_head(model, layer_context(torch.float32, group))
    model.lm_head.inner.finish_loading()
    found = model.lm_head(torch.eye(32)[None])[0]
    rows = torch.cat([table, torch.zeros(1, 32)])[rank * 102 : (rank + 1) * 102]
    torch.testing.assert_close(found, torch.cat([rows, rows]).T[:, :VOCAB_SIZE].contiguous(), rtol=1e-4, atol=1e-5)
