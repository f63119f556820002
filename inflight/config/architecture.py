"""`ModelArchitecture`: what config.json says about the network, with the same field names for every family of models."""

from __future__ import annotations

from dataclasses import dataclass

# Who computes a model: Inflight's own code, or the code of Hugging Face transformers.
INFLIGHT, TRANSFORMERS = "inflight", "transformers"

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` is "default", "linear", "llama3" or "yarn". Each kind uses only some of the fields.

    In yarn, cos and sin are multiplied by `attention_factor`, and the correction range is rounded to whole dimensions if
    `truncate` is set.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only transformer.

    `name` is the class name in config.json's "architectures". The same code computes all families (`models/llama.py`).
    `sliding_windows` has an entry for each layer: the number of tokens that a query may see, itself included. None means that
    it may see all tokens before it. `weight_format` says how the linear weights are stored, by a name in `weight_format.py`.

    If `implementation` is TRANSFORMERS, only the sizes, `dtype`, `weight_format` and `eos_token_ids` are known, and `head_dim`
    is an estimate. The model's constructor finds out everything else.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    weight_format: str = "plain"
    eos_token_ids: tuple[int, ...] = ()
    implementation: str = INFLIGHT
