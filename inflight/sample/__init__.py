"""Sampling: how tokens are drawn from logits. `SamplingState` (per slot) -> `SamplingRows` (per step) -> `Sampler`.

Importing this package does not import torch, because processes without torch import its modules `seeds` and `validation`.
"""
