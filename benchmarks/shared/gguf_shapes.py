"""Mixtures of experts of real shapes as quantized GGUF files, which Inflight and llama.cpp both read.

The files are too large to be made from floats: the weights of Qwen3-30B-A3B alone are 61 GB in bfloat16. So they are written
tensor by tensor. Quantized blocks are random bits with scales that give the weights a standard deviation of about 0.02 (0.023
with MXFP4), as in the other models of `models.py`. There is no tokenizer: a file is asked for token ids only.

A step's time is nearly proportional to the number of layers. So a machine without memory for a whole model measures a part of
its layers: "qwen3-30b-a3b:12" is the model with its first 12 layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

NOISE_BYTES = 1 << 26  # of random bits; a larger tensor repeats them
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
EXPERTS = "_exps.weight"  # the end of the names of experts' weights


@dataclass(frozen=True, kw_only=True)
class GgufShape:
    """`types`: GGUF types of matrices, by a part of their names in the file; "" is the type of all others. Norms, biases,
    routers and sinks are float32."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    vocab_size: int
    context_length: int
    rope_base: float
    eps: float
    types: dict[str, str]
    has_biases_and_sinks: bool = False


# As files called Q4_K_M: half of the value and down projections and the head are in Q6_K.
_QWEN3_30B_A3B = GgufShape(
    architecture="qwen3moe",
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    expert_size=768,
    vocab_size=151936,
    context_length=40960,
    rope_base=1e6,
    eps=1e-6,
    types={"": "Q4_K", HEAD: "Q6_K", "attn_v": "Q4_K Q6_K", "ffn_down": "Q4_K Q6_K"},
)
GGUF_SHAPES = {
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    # As files called Q4_0, which fit into 24 GB.
    "qwen3-30b-a3b-q4_0": replace(_QWEN3_30B_A3B, types={"": "Q4_0", HEAD: "Q6_K"}),
    "gpt-oss-20b": GgufShape(
        architecture="gpt-oss",
        num_layers=24,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=32,
        top_k=4,
        expert_size=2880,
        vocab_size=201088,
        context_length=131072,
        rope_base=150000.0,
        eps=1e-5,
        types={"": "Q8_0", EXPERTS: "MXFP4"},
        has_biases_and_sinks=True,
    ),
}


def gguf_shape(model: str) -> GgufShape | None:
    """The shape that a --model names, as "gpt-oss-20b", or "gpt-oss-20b:6" for its first 6 layers. None if it names none of
    these shapes.

    Raises:
        SystemExit: the shape does not have so many layers.
    """
    name, _, layers = model.partition(":")
    if name not in GGUF_SHAPES or not layers:
        return GGUF_SHAPES.get(name) if not layers else None
    shape = GGUF_SHAPES[name]
    if not (layers.isascii() and layers.isdecimal() and 1 <= int(layers) <= shape.num_layers):
        raise SystemExit(f"--model {model!r}: {name} has 1 to {shape.num_layers} layers, not {layers!r}")
    return replace(shape, num_layers=int(layers))


def gguf_file(model: str, shape: GgufShape, models_folder: Path) -> Path:
    """The file of a shape, written if it is not there."""
    path = models_folder / f"{model.replace(':', '-layers-')}.gguf"
    if not path.is_file():
        models_folder.mkdir(parents=True, exist_ok=True)
        unfinished = models_folder / f".{path.name}-unfinished"
        try:
            write_gguf(shape, unfinished)
            unfinished.rename(path)  # whole or not at all
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def write_gguf(shape: GgufShape, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture)
    add_metadata(writer, shape)
    tensors = [(name, sizes, _type_of(shape, name, len(sizes))) for name, sizes in tensors_of(shape)]
    for name, sizes, kind in tensors:
        as_bytes = gguf.quant_shape_to_byte_shape(sizes, kind) if kind != gguf.GGMLQuantizationType.F32 else sizes
        dtype = np.dtype(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.uint8)
        num_bytes = int(np.prod(as_bytes)) * dtype.itemsize
        writer.add_tensor_info(name, as_bytes, dtype, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    noise = {kind: blocks_of(kind.name, random) for _, _, kind in tensors if kind != gguf.GGMLQuantizationType.F32}
    for name, sizes, kind in tensors:
        if kind == gguf.GGMLQuantizationType.F32:
            writer.write_tensor_data(floats_of(name, sizes, random))
        else:
            writer.write_tensor_data(np.resize(noise[kind], gguf.quant_shape_to_byte_shape(sizes, kind)))
    writer.close()


def add_metadata(writer: Any, shape: GgufShape) -> None:  # Any: gguf.GGUFWriter
    import gguf

    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.expert_size)
    writer.add_expert_feed_forward_length(shape.expert_size)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if shape.architecture == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)


def tensors_of(shape: GgufShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as numpy has them: the last axis is that of input features."""
    hidden, query, key_value = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield EMBEDDING, (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        matrices: dict[str, tuple[int, ...]] = {
            "attn_q": (query, hidden),
            "attn_k": (key_value, hidden),
            "attn_v": (key_value, hidden),
            "attn_output": (hidden, query),
            "ffn_gate_inp": (shape.num_experts, hidden),
            "ffn_gate_exps": (shape.num_experts, shape.expert_size, hidden),
            "ffn_up_exps": (shape.num_experts, shape.expert_size, hidden),
            "ffn_down_exps": (shape.num_experts, hidden, shape.expert_size),
        }
        for name, sizes in matrices.items():
            yield f"blk.{layer}.{name}.weight", sizes
            if shape.has_biases_and_sinks:
                yield f"blk.{layer}.{name}.bias", sizes[:-1]
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        if shape.has_biases_and_sinks:
            yield f"blk.{layer}.attn_sinks.weight", (shape.num_heads,)
            yield f"blk.{layer}.post_attention_norm.weight", (hidden,)
        else:
            yield f"blk.{layer}.attn_q_norm.weight", (shape.head_dim,)
            yield f"blk.{layer}.attn_k_norm.weight", (shape.head_dim,)
            yield f"blk.{layer}.ffn_norm.weight", (hidden,)
    yield "output_norm.weight", (hidden,)
    yield HEAD, (shape.vocab_size, hidden)


def _type_of(shape: GgufShape, name: str, num_axes: int) -> Any:  # Any: gguf.GGMLQuantizationType
    import gguf

    if num_axes == 1 or name.endswith(".bias") or "ffn_gate_inp" in name:
        return gguf.GGMLQuantizationType.F32
    # the last entry that is in the name; two types alternate from layer to layer
    kinds = [kinds for part, kinds in shape.types.items() if part in name][-1].split()
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    return gguf.GGMLQuantizationType[kinds[layer % len(kinds)]]


def floats_of(name: str, sizes: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    if name.endswith("norm.weight"):
        return np.ones(sizes, np.float32)
    return random.normal(0, 0.02, sizes).astype(np.float32)


def blocks_of(kind: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """About NOISE_BYTES of blocks of a type, uint8 [blocks * bytes of a block]: random bits with scales that fit 0.02."""
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (NOISE_BYTES // size, size), np.uint8)

    def halves(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)

    if kind == "Q8_0":
        halves(0, 0.02 / 73.9)  # the standard deviation of a random int8
    elif kind == "Q4_0":
        halves(0, 0.02 / 4.61)  # the standard deviation of a random nibble
    elif kind == "Q4_K":
        # weights are d * scale * (nibble - 7.5), because all minima are as large as the scales; these are 40 of at most 63
        halves(0, 0.02 / (40 * 4.61))
        halves(2, 7.5 * 0.02 / (40 * 4.61))
        # eight scales and eight minima of 6 bits in 12 bytes: 0 to 3 and their minima in the low 6 bits of the first 8 bytes,
        # whose highest bits belong to the others; the low 4 bits of those are in the last 4 bytes
        blocks[:, 4:12] = 40 | (40 >> 4) << 6
        blocks[:, 12:16] = (40 & 15) | (40 & 15) << 4
    elif kind == "Q6_K":
        blocks[:, 192:208] = 16  # scales
        halves(208, 0.02 / (16 * 18.5))
    elif kind == "MXFP4":
        blocks[:, 0] = 120  # the scale 2**(120 - 127)
    else:
        raise ValueError(f"no random blocks of {kind}")
    return blocks.reshape(-1)
