"""Loads models: plain and quantized safetensors, GGUF files, or random weights."""
