"""Train a small mixture of experts on the embedded model's tasks.

    python -m scripts.demo.mixture --output FOLDER [--minutes 10]

What quantization costs can only be measured on trained weights. This model has the shape of Qwen3-MoE, fewer than 5 million
parameters, and the embedded model's tokenizer. It is made for such measurements (`benchmarks.accuracy --trained FOLDER`) and is
not shipped.

The router is kept balanced by the auxiliary loss of transformers. AdamW on float32 weights; the learning rate rises for
NUM_WARMUP_STEPS, and falls linearly to zero in the last DECAY of the time. The folder gets the weights in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

from inflight.hub import EMBEDDED_MODEL
from scripts.demo.tokenizer import END_ID, MAX_LENGTH, PAD_ID, save_tokenizer
from scripts.demo.train import (
    DECAY,
    IGNORED,
    NUM_WARMUP_STEPS,
    TOKENS_PER_STEP,
    Document,
    draw_for_training,
    encode,
    groups,
)

PEAK_RATE = 2e-3
AUXILIARY = 0.01  # the weight of the loss that balances the router
MAX_PARAMETERS = 5_000_000


def make_model(vocab_size: int, **fields: Any) -> Any:  # Any: a class of transformers; its fields
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        **fields,
    }
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
        output_router_logits=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        **shape,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < MAX_PARAMETERS
    return model


class MixtureTrainer:
    """Owns the model and its optimizer. `step` makes one update with documents that its index determines."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:  # Any: see make_model
        self.model, self.tokenizer = model, tokenizer
        self.step_index = 0
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (others if parameter.dim() == 1 or "embed" in name else decayed).append(parameter)
        rows = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(rows, lr=PEAK_RATE, betas=(0.9, 0.95))

    def step(self, progress: float, num_tokens: int = TOKENS_PER_STEP) -> float:
        """`progress`: which share of the time is over. Returns the mean loss of a target token."""
        rng, documents = Random(self.step_index), list[Document]()
        while sum(len(document.ids) for document in documents) < num_tokens:
            documents.append(encode(draw_for_training(rng), self.tokenizer))
        num_targets = sum(target != IGNORED for document in documents for target in document.targets)
        total = 0.0
        for ids, targets in groups(documents):
            out = self.model(input_ids=ids, use_cache=False)
            loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
            (loss / num_targets + AUXILIARY * out.aux_loss * ids.numel() / num_tokens).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = max(0.0, min(1.0, (self.step_index + 1) / NUM_WARMUP_STEPS, (1 - progress) / DECAY)) * PEAK_RATE
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_index += 1
        return total / num_targets


def train(trainer: MixtureTrainer, seconds: float, report: Callable[[str], None]) -> None:
    """Trains for so many seconds of the process's CPU time."""
    start, mean_loss = time.process_time(), 0.0
    while (spent := time.process_time() - start) < seconds:
        loss = trainer.step(spent / seconds)
        mean_loss = loss if mean_loss == 0 else 0.95 * mean_loss + 0.05 * loss
        if trainer.step_index % 25 == 0:
            report(f"step {trainer.step_index} cpu {spent:.0f} s loss {mean_loss:.4f}")


def export(trainer: MixtureTrainer, folder: Path) -> None:
    """Writes a Hugging Face folder."""
    model = trainer.model.bfloat16()
    model.config.output_router_logits = False
    model.save_pretrained(folder)
    save_tokenizer(trainer.tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small mixture of experts and write its folder.")
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, default=10, help="CPU minutes of training [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    trainer = MixtureTrainer(make_model(tokenizer.get_vocab_size()), tokenizer)
    train(trainer, options.minutes * 60, lambda line: print(line, flush=True))
    export(trainer, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
