"""Attention over the block arena: one ABC, one file per backend."""
