"""Attention over the block arena: one ABC, one file per backend."""

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.attention.selector import get_backend

__all__ = ["AttentionBackend", "AttentionInputs", "AttentionMetadata", "get_backend"]
