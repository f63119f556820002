"""`Projector`: how an mmproj file stores the part of a model that reads images, one entry of `PROJECTORS` for each kind.

An mmproj file is a GGUF file with the architecture "clip". Its key clip.projector_type names the kind, and clip.vision.* are
the sizes of the tower. Keys and tensor names are those of llama.cpp's converter and of
https://github.com/ggml-org/llama.cpp/tree/master/tools/mtmd.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inflight.config.json_fields import JsonFields

SHAPES = "tensor shapes"  # a key beside those of the file: the name of each tensor -> its shape
_VISION = "clip.vision."
NUM_FRAMES = 2  # in the tensors of Qwen's patches
_TILES_PER_SIDE = 4  # of an image of Idefics3 and SmolVLM, in the released models
BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of what a layer of Gemma 4 takes and makes
_IN_LAYER = re.compile(rf"v\.blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias|{'|'.join(BOUNDS)})")
_MATRIX = ".linear"
_DEEPSTACK = re.compile(r"v\.deepstack\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Projector:
    """
    Attributes:
        name: the value of clip.projector_type.
        architectures: the family's name in the GGUF file of the part for text -> the name of the whole model in config.json.
        model_type: of a model of this kind, in transformers.
        image_token: the text of the token of which a prompt has one for each embedding of an image.
        other_tokens: other tokens that must be in the vocabulary.
        config: makes the fields of config.json that are outside of the part for text.
        processor: makes what the model's folder would have in preprocessor_config.json and processor_config.json together.
        tokenizer: names of tokens in transformers -> the tokens, where the family's processor asks the tokenizer for them.
        layers: what the names of a layer's tensors begin with in the model, in front of the layer's number.
        in_layer: names of a layer's tensors in the file -> their names in the model.
        tensors: the same for tensors outside of layers, without "weight" and "bias" at the end.
        has_flat_patches: the model has a matrix for patches, whose rows go over the colours of a pixel first. The file has a
            convolution.
    """

    name: str
    architectures: Mapping[str, str]
    model_type: str
    image_token: str
    other_tokens: tuple[str, ...]
    config: Callable[[JsonFields], dict[str, object]]
    processor: Callable[[JsonFields], dict[str, object]]
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    layers: str
    in_layer: Mapping[str, str]
    tensors: Mapping[str, str]
    has_flat_patches: bool = False

    def model_name(self, stored_name: str, deepstack: tuple[int, ...]) -> str:
        """Returns a tensor's name in a model folder. `deepstack`: the layers whose results are features for the decoder. A
        tensor that no supported model has keeps its name, and the loader refuses it."""
        in_layer = _IN_LAYER.fullmatch(stored_name)
        if in_layer is not None and in_layer[2] in self.in_layer:
            module, suffix = self.in_layer[in_layer[2]], in_layer[3]
            if suffix in BOUNDS:  # they belong to the layer around the matrix
                module = module.removesuffix(_MATRIX)
            return f"{self.layers}.{in_layer[1]}.{module}.{suffix}"
        merger = _DEEPSTACK.fullmatch(stored_name)
        if merger is not None and merger[2] in _DEEPSTACK_NAMES and int(merger[1]) in deepstack:
            index = deepstack.index(int(merger[1]))
            return f"model.visual.deepstack_merger_list.{index}.{_DEEPSTACK_NAMES[merger[2]]}.{merger[3]}"
        stem, _, suffix = stored_name.rpartition(".")
        return self.tensors.get(stored_name) or (
            f"{self.tensors[stem]}.{suffix}" if stem in self.tensors else stored_name
        )


def vision_integer(fields: JsonFields, name: str, default: int | None = None, *, least: int = 1) -> int:
    """`name`: a key of the file, without "clip.vision."."""
    return fields.integer(f"{_VISION}{name}", default, least=least)


def deepstack_layers(fields: JsonFields) -> tuple[int, ...]:
    """The layers of the tower whose results are features for the first decoder layers."""
    flags = fields.values.get(f"{_VISION}is_deepstack_layers", ())
    if not isinstance(flags, (list, tuple)) or not all(isinstance(flag, bool) for flag in flags):
        raise fields.refusal(f"{_VISION}is_deepstack_layers={flags!r} is not an array of booleans")
    return tuple(index for index, flag in enumerate(flags) if flag)


def _activation(fields: JsonFields) -> str:
    """The activation of the layers' MLPs, by transformers' name."""
    flags = fields.boolean("clip.use_gelu", False), fields.boolean("clip.use_silu", False)
    if flags[0] == flags[1]:
        raise fields.refusal(
            f"clip.use_gelu={flags[0]} and clip.use_silu={flags[1]} are not supported; one of them must be true"
        )
    return "gelu_pytorch_tanh" if flags[0] else "silu"


def _patches_per_side(fields: JsonFields) -> int:
    image_size, patch_size = vision_integer(fields, "image_size"), vision_integer(fields, "patch_size")
    if image_size < patch_size:
        raise fields.refusal(f"{_VISION}image_size={image_size} is less than {_VISION}patch_size={patch_size}")
    return image_size // patch_size


def _colors(fields: JsonFields) -> dict[str, object]:
    """The mean and the standard deviation of each colour."""
    found: dict[str, object] = {}
    for name in ("image_mean", "image_std"):
        key = f"{_VISION}{name}"
        is_not_moved = name == "image_mean" and fields.values.get(key) == [0, 0, 0]
        numbers = (0.0, 0.0, 0.0) if is_not_moved else fields.numbers(key)
        if len(numbers) != 3:
            raise fields.refusal(f"{key}={list(numbers)} does not have a number for each of three colours")
        found[name] = list(numbers)
    return found


def _siglip(fields: JsonFields) -> dict[str, object]:
    return {
        "hidden_size": vision_integer(fields, "embedding_length"),
        "intermediate_size": vision_integer(fields, "feed_forward_length"),
        "num_hidden_layers": vision_integer(fields, "block_count"),
        "num_attention_heads": vision_integer(fields, "attention.head_count"),
        "image_size": vision_integer(fields, "image_size"),
        "patch_size": vision_integer(fields, "patch_size"),
        "layer_norm_eps": fields.number(f"{_VISION}attention.layer_norm_epsilon"),
        "hidden_act": _activation(fields),
    }


def _tokens_per_side(fields: JsonFields, scale_factor: int) -> int:
    count = _patches_per_side(fields) // scale_factor
    if not count:
        raise fields.refusal(f"{_VISION}projector.scale_factor={scale_factor} is more than the patches of a row")
    return count


def _idefics3_scale(fields: JsonFields) -> int:
    return vision_integer(fields, "projector.scale_factor")


def _idefics3_config(fields: JsonFields) -> dict[str, object]:
    return {"vision_config": _siglip(fields), "scale_factor": _idefics3_scale(fields)}


def _idefics3_processor(fields: JsonFields) -> dict[str, object]:
    tile = vision_integer(fields, "image_size")
    return {
        "processor_class": "Idefics3Processor",
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": vision_integer(fields, "preproc_image_size", _TILES_PER_SIDE * tile)},
        "image_seq_len": _tokens_per_side(fields, _idefics3_scale(fields)) ** 2,
        **_colors(fields),
    }


def _gemma3_tokens(fields: JsonFields) -> int:
    return _tokens_per_side(fields, vision_integer(fields, "projector.scale_factor", 4)) ** 2


def _gemma3_config(fields: JsonFields) -> dict[str, object]:
    return {"vision_config": _siglip(fields), "mm_tokens_per_image": _gemma3_tokens(fields)}


def _gemma3_processor(fields: JsonFields) -> dict[str, object]:
    side = vision_integer(fields, "image_size")
    return {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "image_seq_length": _gemma3_tokens(fields),
        **_colors(fields),
    }


def _gemma4_sizes(fields: JsonFields) -> dict[str, object]:
    """What both the tower and the processor need. Files have no key for the second size: it is that of all released models."""
    return {
        "patch_size": vision_integer(fields, "patch_size"),
        "pooling_kernel_size": vision_integer(fields, "projector.scale_factor", 3),
    }


def _gemma4_config(fields: JsonFields) -> dict[str, object]:
    """Several fields of the tower have no key in the file. Its tensors say them."""
    shapes = fields.values[SHAPES]
    assert isinstance(shapes, Mapping)
    places = shapes.get(_GEMMA4_PLACES, ())
    if len(places) != 3 or places[0] != 2:
        raise fields.refusal(
            f"{_GEMMA4_PLACES} has the shape {list(places)}, and not that of two tables, for columns and rows"
        )
    size = vision_integer(fields, "embedding_length")
    num_heads = vision_integer(fields, "attention.head_count")
    if size % num_heads:
        raise fields.refusal(f"{_VISION}embedding_length={size} is not a multiple of the {num_heads} heads")
    tower = {
        "hidden_size": size,
        "intermediate_size": vision_integer(fields, "feed_forward_length"),
        "num_hidden_layers": vision_integer(fields, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": size // num_heads,
        "position_embedding_size": places[1],
        "rms_norm_eps": fields.number(f"{_VISION}attention.layer_norm_epsilon"),
        "use_clipped_linears": any(name.endswith(f".{BOUNDS[0]}") for name in shapes),
        "standardize": "v.std_bias" in shapes,
    }
    return {"vision_config": {**tower, **_gemma4_sizes(fields)}}


def _gemma4_processor(fields: JsonFields) -> dict[str, object]:
    return {
        "processor_class": "Gemma4Processor",
        "image_processor_type": "Gemma4ImageProcessor",
        "max_soft_tokens": _GEMMA4_TOKENS,
        "image_seq_length": _GEMMA4_TOKENS,
        "do_normalize": True,
        **_gemma4_sizes(fields),
        **_colors(fields),
    }


def _qwen(fields: JsonFields, **more: object) -> dict[str, object]:
    tower = {
        "hidden_size": vision_integer(fields, "embedding_length"),
        "intermediate_size": vision_integer(fields, "feed_forward_length"),
        "depth": vision_integer(fields, "block_count"),
        "num_heads": vision_integer(fields, "attention.head_count"),
        "patch_size": vision_integer(fields, "patch_size"),
        "spatial_merge_size": vision_integer(fields, "spatial_merge_size", 2),
        "temporal_patch_size": NUM_FRAMES,
        "out_hidden_size": vision_integer(fields, "projection_dim"),
        "hidden_act": _activation(fields),
    }
    return {"vision_config": {**tower, **more}}


def _qwen2_5_config(fields: JsonFields) -> dict[str, object]:
    num_layers, every = vision_integer(fields, "block_count"), vision_integer(fields, "n_wa_pattern", least=0)
    full_layers = [layer for layer in range(num_layers) if not every or (layer + 1) % every == 0]
    window_size = vision_integer(fields, "window_size", 112)
    return _qwen(fields, window_size=window_size, fullatt_block_indexes=full_layers)


def _qwen3_config(fields: JsonFields) -> dict[str, object]:
    positions = _patches_per_side(fields) ** 2
    return _qwen(fields, num_position_embeddings=positions, deepstack_visual_indexes=list(deepstack_layers(fields)))


def _qwen_processor(name: str, min_pixels: int, max_pixels: int) -> Callable[[JsonFields], dict[str, object]]:
    """`min_pixels`, `max_pixels`: of an image, if the file does not have them: those of the released models."""

    def make(fields: JsonFields) -> dict[str, object]:
        least = vision_integer(fields, "image_min_pixels", min_pixels)
        most = vision_integer(fields, "image_max_pixels", max_pixels)
        if least > most:
            raise fields.refusal(f"{_VISION}image_min_pixels={least} is more than {_VISION}image_max_pixels={most}")
        return {
            "processor_class": name,
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": least, "longest_edge": most},
            "patch_size": vision_integer(fields, "patch_size"),
            "temporal_patch_size": NUM_FRAMES,
            "merge_size": vision_integer(fields, "spatial_merge_size", 2),
            **_colors(fields),
        }

    return make


_SIGLIP_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_LAYER = {
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}
_GEMMA4_PLACES = "v.position_embd.weight"
_GEMMA4_TOKENS = 280  # the most of an image, in the released models
_GEMMA4_LAYER = {
    "attn_q": f"self_attn.q_proj{_MATRIX}",
    "attn_k": f"self_attn.k_proj{_MATRIX}",
    "attn_v": f"self_attn.v_proj{_MATRIX}",
    "attn_out": f"self_attn.o_proj{_MATRIX}",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": f"mlp.gate_proj{_MATRIX}",
    "ffn_up": f"mlp.up_proj{_MATRIX}",
    "ffn_down": f"mlp.down_proj{_MATRIX}",
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_QWEN_LAYERS = "model.visual.blocks"
_QWEN_PATCHES = "model.visual.patch_embed.proj"
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>")
_DEEPSTACK_NAMES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def _siglip_tensors(prefix: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{prefix}.embeddings.patch_embedding",
        "v.position_embd": f"{prefix}.embeddings.position_embedding",
        "v.post_ln": f"{prefix}.post_layernorm",
    }


# Qwen3.5 has no features for decoder layers, and else the same tower.
PROJECTORS = {
    each.name: each
    for each in (
        Projector(
            name="idefics3",
            architectures={"llama": "Idefics3ForConditionalGeneration"},
            model_type="idefics3",
            image_token="<image>",
            other_tokens=("<fake_token_around_image>",),
            config=_idefics3_config,
            processor=_idefics3_processor,
            layers="model.vision_model.encoder.layers",
            in_layer=_SIGLIP_LAYER,
            tensors={
                **_siglip_tensors("model.vision_model"),
                "mm.model.fc": "model.connector.modality_projection.proj",
            },
        ),
        Projector(
            name="gemma3",
            architectures={"gemma3": "Gemma3ForConditionalGeneration"},
            model_type="gemma3",
            image_token="<image_soft_token>",
            other_tokens=("<start_of_image>", "<end_of_image>"),
            config=_gemma3_config,
            processor=_gemma3_processor,
            tokenizer={
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
            layers="model.vision_tower.encoder.layers",
            in_layer=_SIGLIP_LAYER,
            tensors={
                **_siglip_tensors("model.vision_tower"),
                "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
                "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
            },
        ),
        Projector(
            name="gemma4v",
            architectures={"gemma4": "Gemma4ForConditionalGeneration"},
            model_type="gemma4",
            image_token="<|image|>",
            other_tokens=("<|image>", "<image|>"),
            config=_gemma4_config,
            processor=_gemma4_processor,
            tokenizer={
                "boi_token": "<|image>",
                "eoi_token": "<image|>",
                "image_token": "<|image|>",
                # the processor of the family asks for them, too
                "boa_token": "<|audio>",
                "eoa_token": "<audio|>",
                "audio_token": "<|audio|>",
            },
            layers="model.vision_tower.encoder.layers",
            in_layer=_GEMMA4_LAYER,
            tensors={
                "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
                _GEMMA4_PLACES: "model.vision_tower.patch_embedder.position_embedding_table",
                "v.std_bias": "model.vision_tower.std_bias",
                "v.std_scale": "model.vision_tower.std_scale",
                "mm.input_projection": "model.embed_vision.embedding_projection",
            },
            has_flat_patches=True,
        ),
        Projector(
            name="qwen2.5vl_merger",
            architectures={"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
            model_type="qwen2_5_vl",
            image_token="<|image_pad|>",
            other_tokens=_QWEN_TOKENS,
            config=_qwen2_5_config,
            processor=_qwen_processor("Qwen2_5_VLProcessor", 56**2, 16_384 * 28**2),
            layers=_QWEN_LAYERS,
            in_layer={**_QWEN_LAYER, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
            tensors={
                "v.patch_embd": _QWEN_PATCHES,
                "v.post_ln": "model.visual.merger.ln_q",
                "mm.0": "model.visual.merger.mlp.0",
                "mm.2": "model.visual.merger.mlp.2",
            },
        ),
        Projector(
            name="qwen3vl_merger",
            architectures={
                "qwen3vl": "Qwen3VLForConditionalGeneration",
                "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
                "qwen35": "Qwen3_5ForConditionalGeneration",
                "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
            },
            model_type="qwen3_vl",
            image_token="<|image_pad|>",
            other_tokens=_QWEN_TOKENS,
            config=_qwen3_config,
            processor=_qwen_processor("Qwen3VLProcessor", 256**2, 16_384 * 32**2),
            layers=_QWEN_LAYERS,
            in_layer={**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
            tensors={
                "v.patch_embd": _QWEN_PATCHES,
                "v.position_embd": "model.visual.pos_embed",
                "v.post_ln": "model.visual.merger.norm",
                "mm.0": "model.visual.merger.linear_fc1",
                "mm.2": "model.visual.merger.linear_fc2",
            },
        ),
    )
}
