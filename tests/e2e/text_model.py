"""A small Llama with random weights and the embedded model's tokenizer, for tests that need texts."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import LlamaConfig

from tests.unit.structured_output.grammar_case import MODEL, tokenizer

EOS_ID = 2


def text_config(max_position_embeddings: int, *, padding: int = 0) -> LlamaConfig:
    """`padding`: how many more tokens the model has than the tokenizer."""
    return LlamaConfig(
        vocab_size=tokenizer("embedded").vocab_size + padding,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        max_position_embeddings=max_position_embeddings,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )


def with_tokenizer(folder: Path) -> Path:
    """Add the tokenizer to the folder of a model, and return the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder
