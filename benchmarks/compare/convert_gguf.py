"""A Llama, Qwen3, Qwen3-MoE, Qwen3.5 or Gemma 3 folder -> GGUF; it runs in the environment of llama.cpp.

    python -m benchmarks.compare.convert_gguf FOLDER TYPE FILE

TYPE is bf16, q8_0 or q4_0, of all matrices; norms and routers stay float32.
The file has no tokenizer: it is asked for token ids only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE_TYPES = {"bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}


def interleave_halves(weight: Any, num_heads: int) -> Any:  # Any: numpy arrays [num_heads * head_dim, ...]
    """Rows of a query or key projection of Llama: llama.cpp rotates neighbours where Hugging Face rotates the two halves."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


NAMES = {"qwen3_5": "qwen35", "qwen3_moe": "qwen3moe"}  # llama.cpp's, where they are others
ADDED_TO_NORMS = ("gemma3", "qwen35")  # llama.cpp does not add it itself


def add_recurrence(writer: Any, config: dict[str, Any]) -> None:
    """What llama.cpp has to know of Qwen3.5's layers."""
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    if heads != config["linear_num_key_heads"]:
        raise SystemExit("llama.cpp has another order of value heads, if they are more than the key heads")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def stack_experts(tensors: dict[str, Any]) -> dict[str, Any]:  # Any: torch's tensors
    """The weights of all experts of a layer in one tensor [num_experts, out_features, in_features], as GGUF has them."""
    import torch

    found: dict[str, dict[int, Any]] = {}
    others = {}
    for name, tensor in tensors.items():
        before, experts, after = name.partition(".experts.")
        if experts and after.partition(".")[0].isdigit():
            index, _, projection = after.partition(".")
            found.setdefault(f"{before}.experts.{projection}", {})[int(index)] = tensor
        else:
            others[name] = tensor
    return {**others, **{name: torch.stack([each[i] for i in sorted(each)]) for name, each in found.items()}}


def convert(folder: Path, quantization: str, path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = config["model_type"].removesuffix("_text")
    architecture = NAMES.get(architecture, architecture)
    head_counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(head_counts["q_proj"])
    writer.add_head_count_kv(head_counts["k_proj"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "qwen35":
        add_recurrence(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[quantization]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    matrix_type = gguf.GGMLQuantizationType[quantization.upper()]
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in stack_experts(load_file(file)).items():
            array = tensor.float().numpy()
            target = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
            if target is None:
                raise SystemExit(f"GGUF has no name for {name}")
            projection = name.split(".")[-2]
            if architecture == "llama" and projection in head_counts:
                array = interleave_halves(array, head_counts[projection])
            if name.endswith("A_log"):
                array = -np.exp(array)
            if name.endswith("conv1d.weight"):
                array = array[:, 0]
            if array.ndim == 1 or name.endswith(("conv1d.weight", ".mlp.gate.weight")):
                if architecture in ADDED_TO_NORMS and name.endswith("norm.weight") and "linear_attn" not in name:
                    array = array + 1
                writer.add_tensor(target, array)
            else:
                writer.add_tensor(target, gguf.quants.quantize(array, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
