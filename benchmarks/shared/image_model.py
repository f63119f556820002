"""A small model that reads images as Qwen3-VL does, without weights: for benchmarks of all that happens before its tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE = "<|image_pad|>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_image_model(folder: Path) -> Path:
    """Write the files of the model into a new folder. Load it with `--load-format dummy`."""
    from transformers import Qwen3VLConfig

    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    text: dict[str, Any] = {
        "model_type": "qwen3_vl_text", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 32768,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128, "pad_token_id": ids["<|endoftext|>"],
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "num_heads": 4, "depth": 3, "intermediate_size": 128, "out_hidden_size": 64,
        "deepstack_visual_indexes": [1],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=ids[IMAGE], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config": config.to_dict(),
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
        "preprocessor_config": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "chat_template": {"chat_template": _TEMPLATE},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIAL)
    return made
