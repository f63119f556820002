"""`ModelInfo`: what a front end says of the model it serves."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served. `name`: as it was given, "embedded" for None. `num_kv_cache_tokens`: what the KV cache holds."""

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    max_num_seqs: int
    num_kv_cache_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, num_kv_cache_tokens: int) -> ModelInfo:
        return cls(
            name=config.model.name,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.architecture.vocab_size,
            dtype=config.model.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_kv_cache_tokens=num_kv_cache_tokens,
        )
