"""The files of the model's folder besides the weights: tokenizer, chat template, processor and configuration.

The model is an Idefics3: a SigLIP tower, whose patches are merged 2 x 2, in front of Llama. An image becomes
NUM_IMAGE_TOKENS tokens between three that mark it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from inflight.tokenizer.chat_template import ChatTemplate
from scripts.demo.tokenizer import train_tokenizer
from scripts.demo.vision.questions import Conversation, draw_conversation

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<end_of_utterance>"
IMAGE, AROUND_IMAGE, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
CONTROL_TOKENS = (PAD, START, END, IMAGE, AROUND_IMAGE, WHOLE_IMAGE)
PAD_ID, START_ID, END_ID, IMAGE_ID = range(4)

VOCAB_SIZE = 448
MAX_LENGTH = 1024
IMAGE_SIZE, PATCH_SIZE, MERGE_SIZE = 64, 8, 2
PLACES_A_SIDE = IMAGE_SIZE // PATCH_SIZE // MERGE_SIZE
NUM_IMAGE_TOKENS = PLACES_A_SIDE**2
INITIAL_DEVIATION = 0.08  # of weights; about 1 / sqrt(hidden_size), so that a layer keeps the size of what it gets
MEAN = DEVIATION = 0.5  # pixels are from 0 to 1 before they are normalized

CHAT_TEMPLATE = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content or [] %}
{{- '<image>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<end_of_utterance>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
_TEMPLATE = ChatTemplate({"default": CHAT_TEMPLATE})


def default_folder() -> Path:
    """Where the trained model is kept: ~/.cache/inflight/drawings, or in the folder that XDG_CACHE_HOME names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight" / "drawings"


def messages_of(conversation: Conversation, image: object) -> list[dict[str, Any]]:
    """The messages up to the last question, with the image before the first."""
    first, *_ = messages = _texts(conversation)[:-1]
    first["content"] = [{"type": "image", "image": image}, {"type": "text", "text": first["content"]}]
    return messages


def expanded(conversation: Conversation, *, image_last: bool = False) -> str:
    """The whole conversation, answers included, with the tokens of the image as the processor writes them. `image_last`: the
    image stands behind the first question."""
    first, *_ = messages = _texts(conversation)
    image = f"{AROUND_IMAGE}{WHOLE_IMAGE}{IMAGE * NUM_IMAGE_TOKENS}{AROUND_IMAGE}"
    first["content"] = first["content"] + image if image_last else image + first["content"]
    return _TEMPLATE.render(messages, add_generation_prompt=False)


def _texts(conversation: Conversation) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": text}
        for question in conversation.questions
        for role, text in (("user", question.text), ("assistant", question.answer))
    ]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on generated questions and answers: the same in every run."""
    rng = Random("tokenizer")
    conversations = [draw_conversation(rng, held_out=False) for _ in range(2000)]
    texts = [text for each in conversations for question in each.questions for text in (question.text, question.answer)]
    return train_tokenizer([*texts, "user\n", "assistant\n", "system\n"], VOCAB_SIZE, CONTROL_TOKENS, ())


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything but config.json and the weights."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_LENGTH,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": END,
            "pad_token": PAD,
        },
        "chat_template": {"chat_template": CHAT_TEMPLATE},
        "preprocessor_config": {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_image_splitting": False,
            "size": {"longest_edge": IMAGE_SIZE},
            "max_image_size": {"longest_edge": IMAGE_SIZE},
            "image_mean": [MEAN] * 3,
            "image_std": [DEVIATION] * 3,
        },
        "processor_config": {"processor_class": "Idefics3Processor", "image_seq_len": NUM_IMAGE_TOKENS},
        "generation_config": {"eos_token_id": [END_ID, PAD_ID], "pad_token_id": PAD_ID, "do_sample": False},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def make_config(**text_fields: Any) -> Any:  # Any: of transformers; its fields
    """`text_fields` replace fields of the decoder."""
    from transformers import Idefics3Config

    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": True,
        "initializer_range": INITIAL_DEVIATION,
        **text_fields,
    }
    return Idefics3Config(
        text_config=text,
        vision_config={
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "patch_size": PATCH_SIZE,
            "image_size": IMAGE_SIZE,
            "initializer_range": INITIAL_DEVIATION,
        },
        image_token_id=IMAGE_ID,
        scale_factor=MERGE_SIZE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
