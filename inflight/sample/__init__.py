"""Choosing tokens from logits: `SamplingState` (per slot) -> `SamplingMetadata` (per step) -> `Sampler`.

Importing this package does not import torch: the engine uses `seeds` and `validation`.
"""
