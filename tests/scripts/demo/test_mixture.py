"""A mixture of experts learns the tasks, and its folder is a model that the engine reads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from inflight.hub import EMBEDDED_MODEL
from scripts.demo.mixture import MixtureTrainer, export, make_model, train
from tests.support.full_context_attention import run_prompt
from tests.unit.model_loader.test_gguf_source import load

FIELDS = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
}


def test_a_mixture_is_trained_and_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    trainer = MixtureTrainer(make_model(tokenizer.get_vocab_size(), **FIELDS), tokenizer)
    first = trainer.step(0.0, num_tokens=256)
    losses = [trainer.step(0.1, num_tokens=256) for _ in range(39)]
    assert sum(losses[-5:]) / 5 < first - 0.5
    lines: list[str] = []
    train(trainer, 0.0, lines.append)  # no time is left
    assert trainer.step_index == 40 and lines == []

    export(trainer, tmp_path)
    prompt = torch.arange(3, 20)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = truth(prompt[None]).logits[0]
    found = run_prompt(load(tmp_path), prompt)
    assert float((found - expected).norm() / expected.norm()) < 1e-3
