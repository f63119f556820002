"""Checkpoints of models that also read images: their part for text gives transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen3_5Config,
)

from inflight import LLM, SamplingParams
from inflight.errors import CheckpointError
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE
from tests.support.vision_models import VISION_CONFIGS

_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 4}


def configs() -> dict[str, PreTrainedConfig]:
    qwen3_5, gemma3, gemma4 = (FAMILY_CONFIGS[name][0].to_dict() for name in ("qwen3_5", "gemma3", "gemma4"))
    pixtral = {**_SMALL, "model_type": "pixtral", "num_hidden_layers": 1, "image_size": 8, "head_dim": 16}
    depth = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    return {
        "qwen3_5": Qwen3_5Config(
            text_config=qwen3_5, vision_config={**_SMALL, **depth}, tie_word_embeddings=True, image_token_id=3
        ),
        "gemma3": Gemma3Config(
            text_config=gemma3,
            vision_config={**_SMALL, "num_hidden_layers": 1, "image_size": 8},
            mm_tokens_per_image=4,
            image_token_index=3,
        ),
        "mistral": Mistral3Config(
            text_config=FAMILY_CONFIGS["mistral"][0].to_dict(), vision_config=pixtral, image_token_index=3
        ),
        "ministral3": Mistral3Config(
            text_config=FAMILY_CONFIGS["ministral3"][0].to_dict(), vision_config=pixtral, image_token_index=3
        ),
        **{name: VISION_CONFIGS[name][0] for name in ("smolvlm", "qwen3_vl", "qwen2_5_vl")},
        "gemma4": Gemma4Config(
            text_config={**gemma4, "pad_token_id": 0},
            vision_config={**_SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16},
            audio_config=None,
            image_token_id=3,
        ),
    }


@pytest.mark.parametrize("older_names", [False, True])
@pytest.mark.parametrize(
    "family", ["qwen3_5", "gemma3", "gemma4", "mistral", "ministral3", "smolvlm", "qwen3_vl", "qwen2_5_vl"]
)
def test_the_part_for_text(tmp_path: Path, family: str, older_names: bool) -> None:
    torch.manual_seed(0)
    truth = AutoModelForImageTextToText.from_config(configs()[family], attn_implementation="eager").eval()
    for parameter in truth.parameters():
        parameter.data.normal_(0, 0.1)
    truth.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if older_names:  # as older releases of transformers have saved them
        weights: dict[str, Any] = load_file(file)
        save_file(
            {name.replace("model.language_model.", "language_model.model."): x for name, x in weights.items()}, file
        )
    prompt = [5, 9, 100, 31, 7, VOCAB_SIZE - 5]
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=64, num_threads=1) as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False
        )
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = truth(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    weights = load_file(file)
    save_file({**weights, "model.other.weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"model\.other\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
