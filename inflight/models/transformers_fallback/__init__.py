"""Runs any causal LM of Hugging Face transformers on Inflight's KV cache. The only place that imports transformers' models."""
