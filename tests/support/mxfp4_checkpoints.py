"""gpt-oss in MXFP4, and the same model in floats, which transformers' own code has made of the random blocks and scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.model_zoo import VOCAB_SIZE, write_model

NUM_EXPERTS, SIZE, HIDDEN_SIZE = 4, 96, 64
CONFIG = GptOssConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    intermediate_size=SIZE,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=NUM_EXPERTS,
    num_experts_per_tok=2,
    sliding_window=11,
    max_position_embeddings=1024,
    eos_token_id=2,
    pad_token_id=None,
)
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def draw_mxfp4(generator: torch.Generator, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of all experts. Half of the numbers are at most 1, so weights are some 2 ** -4 large."""
    shape = NUM_EXPERTS, num_rows, num_columns // 32
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)


def write_mxfp4(folder: Path) -> tuple[Path, Path]:
    """(a folder with floats, a folder in MXFP4), both in float32 where they are not in MXFP4."""
    plain, packed = write_model(CONFIG, folder / "plain", seed=6), folder / "mxfp4"
    weights = load_file(plain / "model.safetensors")
    stored = dict(weights)
    generator = torch.Generator().manual_seed(6)
    for layer in range(CONFIG.num_hidden_layers):
        for stack, sizes in (("gate_up_proj", (2 * SIZE, HIDDEN_SIZE)), ("down_proj", (HIDDEN_SIZE, SIZE))):
            name = f"model.layers.{layer}.mlp.experts.{stack}"
            blocks, scales = draw_mxfp4(generator, *sizes)
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del stored[name]
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return plain, packed
