"""Is a token sequence what transformers would have generated greedily? One forward pass tells.

If every token is the argmax of transformers' logits after the tokens before it, greedy generation gives exactly this
sequence. Where it is not, the two logits must be closer than rounding can tell apart, and the case is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

MARGIN = 1e-4


@dataclass
class Comparison:
    """Counts over many sequences. `margin`: what rounding can move two logits of one token against each other."""

    margin: float = MARGIN
    num_tokens: int = 0
    num_ties: int = 0  # tokens that differ where the reference's margin is below ours

    def add(self, model: PreTrainedModel, prompt: list[int], output: list[int]) -> None:
        """Raises AssertionError at the first token that differs beyond the margin."""
        with torch.inference_mode():
            tokens = torch.tensor([prompt + output[:-1]], device=model.device)
            logits = model(tokens).logits[0, len(prompt) - 1 :].double()
        for i, token in enumerate(output):
            self.num_tokens += 1
            best = int(logits[i].argmax())
            if token != best:
                margin = float(logits[i, best] - logits[i, token])
                assert margin < self.margin, f"token {i} is {token}; the reference says {best}, ahead by {margin:.2g}"
                self.num_ties += 1

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, {self.num_ties} of them ties below {self.margin:.2g}"
