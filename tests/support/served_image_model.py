"""A whole small model that reads images, as a folder that `inflight serve` takes: SmolVLM's classes, tokenizer, processor and
chat template, with random weights. A token is a byte of a text."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import SmolVLMConfig

from tests.support.model_zoo import FAMILY_CONFIGS
from tests.support.vision_models import write_vision_model

SIZE = 24  # rows and columns of pixels of a tile
PATCH, SCALE = 4, 2
TOKENS_OF_TILE = (SIZE // PATCH // SCALE) ** 2
IMAGE, END = "<image>", "<end_of_utterance>"
_SPECIAL = [
    *("<|im_start|>", END, "<fake_token_around_image>", "<global-img>", IMAGE),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def write_served_image_model(folder: Path, **text_config: Any) -> Path:
    """`text_config`: fields of the decoder, such as max_position_embeddings."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    text = {**FAMILY_CONFIGS["llama"][0].to_dict(), "vocab_size": tokenizer.get_vocab_size(), **text_config}
    ends = {"bos_token_id": tokenizer.token_to_id("<|im_start|>"), "eos_token_id": tokenizer.token_to_id(END)}
    tower = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = SmolVLMConfig(
        text_config={**text, **ends, "pad_token_id": ends["eos_token_id"]},
        vision_config={**tower, "patch_size": PATCH, "image_size": SIZE},
        image_token_id=tokenizer.token_to_id(IMAGE),
        scale_factor=SCALE,
        **ends,
    )
    write_vision_model(config, folder, seed=0)
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": SIZE},
        "size": {"longest_edge": 2 * SIZE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    names = {"bos_token": "<|im_start|>", "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        "tokenizer_config": names,
        "preprocessor_config": processor,
        "processor_config": {"image_seq_len": TOKENS_OF_TILE, "processor_class": "SmolVLMProcessor"},
        "chat_template": {"chat_template": TEMPLATE},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def base64_of(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode("ascii")


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64_of(image)}"
