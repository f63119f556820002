"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in the upper layers (arXiv:2407.10671)."""

from __future__ import annotations

from inflight.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`qkv_bias` is always there; `sliding_windows` follows `use_sliding_window` with `max_window_layers` or `layer_types`."""
