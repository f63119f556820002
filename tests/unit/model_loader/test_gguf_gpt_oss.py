"""GGUF files of gpt-oss, written by the package `gguf` as llama.cpp's converter does, against folders with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.errors import CheckpointError, UnsupportedModelError
from inflight.model_loader.gguf_source import GgufSource
from inflight.model_loader.stacked_experts import StackedExperts
from tests.support.full_context_attention import run_prompt
from tests.support.model_zoo import write_model
from tests.support.mxfp4_checkpoints import CONFIG, NUM_EXPERTS
from tests.unit.model_loader.test_gguf_source import PROMPT, as_floats, load, read

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
OTHERS |= {"lm_head.weight": "output.weight"}


def stored_name(name: str) -> str:
    if name in OTHERS:
        return OTHERS[name]
    layer, _, module = name.removeprefix("model.layers.").partition(".")
    stem, _, end = module.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}" if module in NAMES else f"blk.{layer}.{NAMES[stem]}.{end}"


def write(folder: Path, kind: GGMLQuantizationType, change: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """(a folder with floats, a GGUF file with the same weights, whose experts have the type `kind`). `change`: other tensors of
    the file; None: there is none of this name."""
    plain = write_model(CONFIG, folder / "plain", seed=8)
    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, tuple[Any, GGMLQuantizationType]] = {}

    def store(name: str, weight: Tensor) -> Tensor:
        """Returns the weight that the file has."""
        blocks = gguf.quantize(weight.numpy(), kind)
        tensors[name] = blocks, kind
        return torch.from_numpy(gguf.dequantize(blocks, kind))

    for layer in range(CONFIG.num_hidden_layers):
        experts, block = f"model.layers.{layer}.mlp.experts", f"blk.{layer}"
        gate_up = weights[f"{experts}.gate_up_proj"].mT.contiguous()
        gate_up[:, ::2] = store(f"{block}.ffn_gate_exps.weight", gate_up[:, ::2].contiguous())
        gate_up[:, 1::2] = store(f"{block}.ffn_up_exps.weight", gate_up[:, 1::2].contiguous())
        down = store(f"{block}.ffn_down_exps.weight", weights[f"{experts}.down_proj"].mT.contiguous())
        bias = weights[f"{experts}.gate_up_proj_bias"]
        biases = {"gate": bias[:, ::2], "up": bias[:, 1::2], "down": weights[f"{experts}.down_proj_bias"]}
        for name, each in biases.items():
            tensors[f"{block}.ffn_{name}_exps.bias"] = each.contiguous().numpy(), GGMLQuantizationType.F32
        weights[f"{experts}.gate_up_proj"] = gate_up.mT.contiguous()
        weights[f"{experts}.down_proj"] = down.mT.contiguous()
    for name, weight in weights.items():
        if ".experts." not in name:
            tensors[stored_name(name)] = weight.numpy(), GGMLQuantizationType.F32
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    return plain, write_file(folder / "model.gguf", {**tensors, **(change or {})})


def write_file(path: Path, tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_expert_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_value_length(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(CONFIG.num_experts_per_tok)
    writer.add_sliding_window(CONFIG.sliding_window)
    writer.add_rope_freq_base(150000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_scaling_yarn_beta_fast(32.0)
    writer.add_rope_scaling_yarn_beta_slow(1.0)
    writer.add_eos_token_id(2)
    for name, stored in tensors.items():
        if stored is not None:
            writer.add_tensor(name, stored[0], raw_dtype=stored[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [GGMLQuantizationType.MXFP4, GGMLQuantizationType.F32])
def test_a_file_is_the_model_of_its_weights(
    tmp_path: Path, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, file = write(tmp_path, kind)
    ours, theirs = (parse_architecture(read_model_config(path)).layers for path in (file, plain))
    assert ours == theirs
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert torch.equal(run_prompt(load(file), PROMPT), run_prompt(load(plain), PROMPT))


def test_biases_are_read_in_parts(tmp_path: Path) -> None:
    plain, file = write(tmp_path, GGMLQuantizationType.MXFP4)
    truth = load_file(plain / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj_bias"]
    source = StackedExperts(GgufSource(file, parse_architecture(read_model_config(file))))
    for expert in range(NUM_EXPERTS):
        found = read(source, f"model.layers.1.mlp.experts.{expert}.up_proj.bias", slice(5, 70))
        assert torch.equal(as_floats(found), truth[expert, 1::2][5:70])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "ffn_up_exps.bias",
            (4, 96, 1),
            r"blk\.0\.ffn_up_exps\.bias in .*up_proj_bias of the model\) has shape \[4, 96, 1\]; it should be ",
        ),
        ("ffn_up_exps.bias", (5, 96), r"does not account for: .*experts\.4\.up_proj\.bias"),
        ("ffn_up_exps.bias", None, r"lacks blk\.0\.ffn_up_exps\.bias$"),
        ("ffn_gate_up_exps.bias", (4, 192), r"blk\.0\.ffn_gate_up_exps\.bias"),
        ("attn_sinks.weight", (5,), r"self_attn\.sinks"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str) -> None:
    stored = None if shape is None else (torch.ones(shape).numpy(), GGMLQuantizationType.F32)
    _, file = write(tmp_path, GGMLQuantizationType.MXFP4, {f"blk.0.{name}": stored})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load(file)
