"""Qwen3, dense: Qwen2 without the biases, with a norm on every query and key head (arXiv:2505.09388)."""

from __future__ import annotations

from inflight.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`qk_norm` is always there; head_dim is a field of its own, num_heads * head_dim need not be hidden_size."""
