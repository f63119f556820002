"""The shipped folder: its size, its files, and a few answers by transformers."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from inflight.hub import EMBEDDED_MODEL
from scripts.demo.evaluate import held_out_samples, with_transformers
from scripts.demo.tasks import is_correct

MAX_BYTES = 12 * 1000 * 1000


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED_MODEL.iterdir()) <= MAX_BYTES


def test_tokenizer_and_config_agree() -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    assert config["model_type"] == "qwen3" and config["tie_word_embeddings"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


@pytest.mark.parametrize("kind", ["arithmetic", "extraction", "facts"])
def test_held_out_prompts_are_answered(kind: str) -> None:
    pytest.importorskip("transformers")
    samples = held_out_samples(kind, 10)
    texts = with_transformers(EMBEDDED_MODEL)(samples)
    assert sum(map(is_correct, samples, texts)) >= 9
