"""Small models that read images as two GGUF files, beside the same model in plain safetensors: llama.cpp's names, metadata and
layouts, after what its converter does with the folders of transformers.

    files = write_mmproj_model(tmp_path, "smolvlm", "Q8_0")
    LLM(str(files.text), mmproj=str(files.mmproj))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from inflight.config.safetensors_file import model_name
from tests.support import gguf_experts, gguf_models, gguf_writer
from tests.support.gguf_files import Number, Stored, floats, quantized, write_gguf
from tests.support.image_models import FAMILIES, ImageFamily, byte_tokenizer, write_image_family
from tests.support.vision_models import write_vision_model

VOCAB_SIZE = 320
PATCH, MERGE = 4, 2
_SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": PATCH,
    "image_size": 24,
}
_QWEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "depth": 4,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": 256,
}
_FEW_PIXELS = {"shortest_edge": 64, "longest_edge": 64 * 12}
_COLORS = {"image_mean": [0.5, 0.25, 0.75], "image_std": [0.5, 0.25, 1.0]}


class _Family(NamedTuple):
    """
    Attributes:
        architecture: of the GGUF file of the part for text.
        projector: the kind of the tower.
        images: what the folder of the model has for its processor.
        tower: keys of the mmproj file that only this family has.
    """

    architecture: str
    projector: str
    config: PreTrainedConfig
    images: ImageFamily
    tower: Mapping[str, Any] = {}
    text: Mapping[str, Any] = {}


class Files(NamedTuple):
    folder: Path
    text: Path
    mmproj: Path
    images: ImageFamily


def _text(config: PreTrainedConfig, model_type: str, sections: list[int] | None = None, **more: Any) -> dict[str, Any]:
    fields = {**config.to_dict(), "model_type": model_type, "vocab_size": VOCAB_SIZE, **more}
    if sections is not None:
        fields["rope_parameters"] = {**(fields.get("rope_parameters") or {}), "mrope_section": sections}
    return fields


def _image_token_id(name: str) -> int:
    family = FAMILIES[name]
    token_id = byte_tokenizer(family.special_tokens).token_to_id(family.image_token)
    assert token_id is not None
    return token_id


def _images(name: str, **image_processor: Any) -> ImageFamily:
    family = FAMILIES[name]
    return family._replace(
        image_processor={**family.image_processor, **_COLORS, **image_processor},
        config={},  # transformers writes it with the weights
    )


def _qwen_images(name: str) -> ImageFamily:
    family = _images(name, size=_FEW_PIXELS, patch_size=PATCH)
    unused = ("min_pixels", "max_pixels")
    return family._replace(image_processor={k: v for k, v in family.image_processor.items() if k not in unused})


def _sections(sections: list[int]) -> dict[str, Any]:
    return {"rope.dimension_sections": Number("I", [*sections, 0])}


_DEEPSTACK = {"is_deepstack_layers": Number("?", [True, False, True, False])}
_PIXELS = {"image_min_pixels": Number("I", 64), "image_max_pixels": Number("I", 64 * 12)}
_GGUF, _EXPERTS = gguf_models.CONFIGS, gguf_experts.CONFIGS
_IDS = {name: _image_token_id(name) for name in ("idefics3", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl")}


def _gemma4(case: str, **tower: Any) -> _Family:
    """`case`: of `gguf_writer`, which makes the file of the part for text."""
    text = gguf_writer.CASES[case][1]
    size: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0}
    if text.hidden_size_per_layer_input:
        size["vocab_size_per_layer_input"] = VOCAB_SIZE
    else:
        size["use_bidirectional_attention"] = "vision"
    sizes = {name: _SIGLIP[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    processor = {"patch_size": PATCH, "max_soft_tokens": 280, "pooling_kernel_size": 3}
    return _Family(
        "gemma4",
        "gemma4v",
        Gemma4Config(
            text_config={**text.to_dict(), **size},
            vision_config={**sizes, **heads, "pooling_kernel_size": 3, "position_embedding_size": 300, **tower},
            audio_config=None,
            image_token_id=_IDS["gemma4"],
        ),
        FAMILIES["gemma4"]._replace(image_processor={**FAMILIES["gemma4"].image_processor, **processor}, config={}),
        {"image_mean": Number("f", [0.0] * 3), "image_std": Number("f", [1.0] * 3), "image_size": Number("I", 224)},
    )


MODELS = {
    "smolvlm": _Family(
        "llama",
        "idefics3",
        Idefics3Config(
            text_config=_text(_GGUF["llama"], "llama", attention_bias=False),
            vision_config={**_SIGLIP, "layer_norm_eps": 1e-3},
            image_token_id=_IDS["idefics3"],
            scale_factor=MERGE,
        ),
        _images("idefics3", max_image_size={"longest_edge": 24}, size={"longest_edge": 48})._replace(
            processor_config={"image_seq_len": 9, "processor_class": "Idefics3Processor"}
        ),
        {"projector.scale_factor": Number("I", MERGE), "preproc_image_size": Number("I", 48)},
    ),
    "gemma3": _Family(
        "gemma3",
        "gemma3",
        Gemma3Config(
            text_config=_text(_GGUF["gemma3"], "gemma3_text"),
            vision_config={**_SIGLIP, "vision_use_head": False},
            mm_tokens_per_image=9,
            image_token_index=_IDS["gemma3"],
        ),
        _images("gemma3", size={"height": 24, "width": 24}, image_seq_length=9)._replace(
            processor_config={"image_seq_length": 9, "processor_class": "Gemma3Processor"}
        ),
        {"projector.scale_factor": Number("I", MERGE)},
    ),
    "gemma4": _gemma4("gemma4", use_clipped_linears=True),
    "gemma4_experts": _gemma4("gemma4, experts", standardize=True),
    "qwen2_5_vl": _Family(
        "qwen2vl",
        "qwen2.5vl_merger",
        Qwen2_5_VLConfig(
            text_config=_text(_GGUF["qwen2"], "qwen2_5_vl_text", [8, 12, 12]),
            vision_config={**_QWEN, "window_size": 24, "fullatt_block_indexes": [1, 3]},
            image_token_id=_IDS["qwen2_5_vl"],
            tie_word_embeddings=True,
        ),
        _qwen_images("qwen2_5_vl"),
        {"n_wa_pattern": Number("I", 2), "window_size": Number("I", 24), **_PIXELS},
        _sections([8, 12, 12]),
    ),
    "qwen3_vl": _Family(
        "qwen3vl",
        "qwen3vl_merger",
        Qwen3VLConfig(
            text_config=_text(_GGUF["qwen3"], "qwen3_vl_text", [8, 4, 4]),
            vision_config={**_QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
            image_token_id=_IDS["qwen3_vl"],
        ),
        _qwen_images("qwen3_vl"),
        {"spatial_merge_size": Number("I", MERGE), **_DEEPSTACK, **_PIXELS},
        {**_sections([8, 4, 4]), "n_deepstack_layers": Number("I", 2)},
    ),
    "qwen3_vl_moe": _Family(
        "qwen3vlmoe",
        "qwen3vl_merger",
        Qwen3VLMoeConfig(
            text_config=_text(_EXPERTS["qwen3moe"], "qwen3_vl_moe_text", [8, 4, 4]),
            vision_config={**_QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
            image_token_id=_IDS["qwen3_vl"],
        ),
        _qwen_images("qwen3_vl"),
        {"spatial_merge_size": Number("I", MERGE), **_DEEPSTACK, **_PIXELS},
        {
            **_sections([8, 4, 4]),
            "n_deepstack_layers": Number("I", 2),
            "expert_count": Number("I", 5),
            "expert_used_count": Number("I", 3),
            "expert_feed_forward_length": Number("I", 512),
        },
    ),
    "qwen3_5": _Family(
        "qwen35",
        "qwen3vl_merger",
        Qwen3_5Config(
            text_config=_text(_GGUF["qwen35"], "qwen3_5_text", [4, 2, 2]),
            vision_config={**_QWEN, "num_position_embeddings": 49},
            image_token_id=_IDS["qwen3_vl"],
        ),
        _qwen_images("qwen3_vl"),
        {**_PIXELS, "is_deepstack_layers": Number("?", [False] * 4)},
        _sections([4, 2, 2]),
    ),
}
_TOWERS = (
    "model.vision_model.",
    "model.connector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.visual.",
)
_LAYER = re.compile(
    r"model\.(?:vision_model\.encoder\.layers|vision_tower\.encoder\.layers|visual\.blocks)\.(\d+)\.(.+?)(?:\.linear)?\.(\w+)"
)
_IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.o_proj": "attn_out", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "ln1", "pre_feedforward_layernorm": "ln2", "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}  # fmt: skip
_WHOLE = {
    "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "model.vision_tower.std_bias": "v.std_bias", "model.vision_tower.std_scale": "v.std_scale",
}  # fmt: skip
_OUTSIDE = {
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln", "connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm", "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd", "merger.ln_q": "v.post_ln", "merger.norm": "v.post_ln",
    "patch_embedder.input_proj": "v.patch_embd", "embed_vision.embedding_projection": "mm.input_projection",
    "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
}  # fmt: skip
_OF_DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
DEEPSTACK = (0, 2)


def tower_name(name: str) -> str:
    """The name of a tower's tensor in the file."""
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        return f"v.blk.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
    if name in _WHOLE:
        return _WHOLE[name]
    stem, _, last = name.rpartition(".")
    if ".deepstack_merger_list." in name:
        _, index, module = stem.removeprefix("model.visual.").split(".")
        return f"v.deepstack.{DEEPSTACK[int(index)]}.{_OF_DEEPSTACK[module]}.{last}"
    outside = next(stored for part, stored in _OUTSIDE.items() if stem.endswith(f".{part}"))
    return f"{outside}.{last}"


def write_mmproj_model(
    folder: Path,
    family: str,
    kind: str = "F32",
    *,
    swapped: bool = False,
    tower: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    changes: Mapping[str, Stored | None] | None = None,
    seed: int = 3,
) -> Files:
    """
    Args:
        kind: of the tower's matrices: F32, F16 or Q8_0. The folder has the weights for which they stand.
        swapped: the names of the MLPs' matrices are swapped, as in old files.
        tower, text: other keys of the two files (of the first without "clip.vision."); None: the key is left out.
        changes: other tensors of the second file; None: the tensor is left out.
    """
    model = MODELS[family]
    folder.mkdir(exist_ok=True)
    plain = write_vision_model(model.config, folder / "plain", seed=seed)
    write_image_family(plain, model.images)
    config = model.config
    weights = load_file(plain / "model.safetensors")
    random = np.random.default_rng(seed)
    of_tower: dict[str, Stored] = {}
    of_text: dict[str, Stored] = {}
    for name in list(weights):
        known = model_name(name, (("model.vision_tower.vision_model.", "model.vision_tower."),))
        if known.startswith(_TOWERS):
            stored, weights[name] = _store_of_tower(
                tower_name(known), weights[name], kind, random, is_divided=family == "qwen2_5_vl"
            )
            of_tower |= _swap(stored) if swapped else stored
        elif model.architecture != "gemma4":
            of_text |= _store_of_text(known, weights[name], model)
    if model.architecture == "gemma4":
        text_file = _write_gemma4_text(folder, family, weights)
    save_file(weights, plain / "model.safetensors")
    vision = config.vision_config
    keys: dict[str, Any] = {
        "image_size": Number("I", getattr(vision, "image_size", 7 * PATCH)),
        "patch_size": Number("I", vision.patch_size),
        "embedding_length": Number("I", vision.hidden_size),
        "feed_forward_length": Number("I", vision.intermediate_size),
        "block_count": Number("I", getattr(vision, "depth", None) or vision.num_hidden_layers),
        "projection_dim": Number("I", config.text_config.hidden_size),
        "attention.head_count": Number("I", vision.num_attention_heads),
        "attention.layer_norm_epsilon": Number("f", getattr(vision, "layer_norm_eps", 1e-6)),
        **{name: Number("f", values) for name, values in _COLORS.items()},
        **model.tower,
        **(tower or {}),
    }
    whole: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": model.projector,
        **({"clip.use_silu" if family == "qwen2_5_vl" else "clip.use_gelu": True} if "gemma4" not in family else {}),
        **{f"clip.vision.{name}": value for name, value in keys.items() if value is not None},
    }
    stored_tower = {name: each for name, each in {**of_tower, **(changes or {})}.items() if each is not None}
    images = write_gguf(folder / "mmproj-model.gguf", whole, stored_tower)
    if model.architecture == "gemma4":
        return Files(plain, text_file, images, model.images)
    metadata = {
        **gguf_models.metadata_of(model.architecture, config.text_config),
        **{f"{model.architecture}.{name}": value for name, value in model.text.items()},
        **_vocabulary(model.images),
        **(text or {}),
    }
    text_file = write_gguf(folder / "model.gguf", {k: v for k, v in metadata.items() if v is not None}, of_text)
    return Files(plain, text_file, images, model.images)


def _write_gemma4_text(folder: Path, family: str, weights: dict[str, Tensor]) -> Path:
    """Writes the file of the part for text, and puts its weights into `weights`."""
    model = MODELS[family]
    (folder / "text").mkdir()

    def add_vocabulary(writer: GGUFWriter) -> None:
        vocabulary = _vocabulary(model.images)
        kinds = [int(kind) for kind in vocabulary["tokenizer.ggml.token_type"].value]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        # the writer leaves out empty arrays; no text has the two bytes of this merge
        writer.add_token_list([*vocabulary["tokenizer.ggml.tokens"][:-1], "ÀÁ"])
        writer.add_token_types([*kinds[:-1], 1])
        writer.add_token_merges(["À Á"])

    plain, file = gguf_writer.write_file(
        folder / "text",
        "gemma4, experts" if family == "gemma4_experts" else "gemma4",
        GGMLQuantizationType.F32,
        change=add_vocabulary,
        config=model.config.text_config,
    )
    for name, weight in load_file(plain / "model.safetensors").items():
        whole = name.replace("model.", "model.language_model.", 1)
        assert whole in weights and weights[whole].shape == weight.shape
        weights[whole] = weight
    return file.rename(folder / "model.gguf")


def _store_of_tower(
    name: str, weight: Tensor, kind: str, random: np.random.Generator, *, is_divided: bool
) -> tuple[dict[str, Stored], Tensor]:
    """The tensors of the file that stand for a weight, and the weight for which they stand. `is_divided`: queries, keys and
    values are tensors of their own."""
    if weight.dim() == 5:  # a tensor for each frame
        frames = {f"{name}{'.1' if index else ''}": floats(each) for index, each in enumerate(weight.unbind(2))}
        return frames, weight
    if name == "v.patch_embd.weight" and weight.dim() == 2:  # rows, columns, colours
        side = int((weight.shape[1] // 3) ** 0.5)
        return {name: floats(weight.view(-1, side, side, 3).permute(0, 3, 1, 2).contiguous())}, weight
    if weight.dim() == 0:
        return {name: floats(weight[None])}, weight
    if name == "mm.soft_emb_norm.weight":
        return {name: floats(weight + 1)}, weight
    if weight.dim() != 2 or name == "v.position_embd.weight" or kind == "F32":
        stored = floats(weight)
    elif kind == "F16" or name == "mm.input_projection.weight":
        stored = floats(weight.half())
    else:
        stored = quantized(kind, tuple(weight.shape), random)
    found = {name: stored}
    if is_divided and ".attn_qkv." in name:
        found = {name.replace("qkv", letter): _third(stored, index) for index, letter in enumerate("qkv")}
    return found, stored.weight.float()


def _third(stored: Stored, index: int) -> Stored:
    size, rows = len(stored.data) // 3, len(stored.weight) // 3
    part = slice(index * size, (index + 1) * size)
    return Stored(stored.kind, stored.data[part], stored.weight[index * rows : (index + 1) * rows])


def _swap(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return {".".join(names.get(part, part) for part in name.split(".")): each for name, each in stored.items()}


def _store_of_text(name: str, weight: Tensor, model: _Family) -> dict[str, Stored]:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
        hidden_size = model.config.text_config.hidden_size
        is_gate_up = "gate_up" in name
        if weight.shape[1 if is_gate_up else 2] == hidden_size:  # the rows are columns
            weight = weight.transpose(1, 2)
        if not is_gate_up:
            return {f"{layer}.ffn_down_exps.weight": floats(weight)}
        gate, up = weight.chunk(2, dim=1)
        return {f"{layer}.ffn_gate_exps.weight": floats(gate), f"{layer}.ffn_up_exps.weight": floats(up)}
    if name.endswith(".mlp.gate.weight"):
        return {f"{layer}.ffn_gate_inp.weight": floats(weight)}
    stem, whole = gguf_models.stored_name(model.architecture, name)
    return {whole: floats(gguf_models.as_stored(model.architecture, stem, weight))}


def _vocabulary(images: ImageFamily) -> dict[str, Any]:
    tokenizer = byte_tokenizer(images.special_tokens)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    num_unused = VOCAB_SIZE - len(tokens)
    kinds = [1] * 256 + [3] * (len(tokens) - 256) + [5] * num_unused
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{index}]" for index in range(num_unused))],
        "tokenizer.ggml.token_type": Number("i", kinds),
        "tokenizer.ggml.merges": [],
    }
