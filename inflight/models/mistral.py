"""Mistral: Llama whose layers see a sliding window, in the first release; later ones have none (arXiv:2310.06825)."""

from __future__ import annotations

from inflight.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """`sliding_windows` is the same in every layer; no bias anywhere."""
