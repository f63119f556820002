"""Sampling: how tokens are drawn from logits. `SamplingState` (per slot) -> `SamplingRows` (per step) -> `Sampler`.

Importing this package does not import torch: the engine uses `seeds` and `validation`.
"""
