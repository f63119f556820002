"""Small encoders of every family, written by transformers, and steps of our own code that compute texts with them.

folder = write_encoder(ENCODER_CONFIGS["bert"][0], tmp_path / "model", seed=0)
hidden = Encoder(folder)([[5, 7, 9], [8]])  # [tokens of the text, hidden_size], for each text
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AutoModel,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from inflight.attention.metadata import AttentionInputs
from inflight.attention.selector import get_backend
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import ModelStep
from tests.support.model_zoo import VOCAB_SIZE

_STANDARD_DEVIATION = 0.15
BLOCK_SIZE = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
_LONG = {**_COMMON, "max_position_embeddings": 514}
_DISTIL = {"vocab_size": VOCAB_SIZE, "dim": 64, "hidden_dim": 112, "n_layers": 3, "n_heads": 4}
_GEMMA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 11}

# The first of each family is the plain one; the others are the ways in which real checkpoints differ from it.
ENCODER_CONFIGS: dict[str, list[PreTrainedConfig]] = {
    "bert": [
        BertConfig(**_COMMON),
        BertConfig(**{**_COMMON, "num_attention_heads": 2}, hidden_act="gelu_new", layer_norm_eps=1e-3),
        BertConfig(**{**_COMMON, "hidden_size": 60, "num_attention_heads": 3}, hidden_act="relu"),  # not for the kernel
        BertConfig(**_COMMON, hidden_act="silu", type_vocab_size=1),
    ],
    "roberta": [RobertaConfig(**_LONG, type_vocab_size=1), RobertaConfig(**{**_LONG, "pad_token_id": 5})],
    "xlm-roberta": [XLMRobertaConfig(**_LONG, type_vocab_size=1)],
    "camembert": [CamembertConfig(**_LONG, type_vocab_size=1)],
    "distilbert": [DistilBertConfig(**_DISTIL), DistilBertConfig(**_DISTIL, sinusoidal_pos_embds=True)],
    "mpnet": [
        MPNetConfig(**_LONG),
        MPNetConfig(**{**_LONG, "num_attention_heads": 2}, hidden_act="relu"),
        MPNetConfig(**{**_LONG, "hidden_size": 60, "num_attention_heads": 3}),  # not for the kernel
    ],
    "albert": [
        AlbertConfig(**_COMMON, embedding_size=32),
        AlbertConfig(**{**_COMMON, "num_hidden_layers": 5}, embedding_size=48, num_hidden_groups=2, hidden_act="gelu"),
    ],
    "modernbert": [
        ModernBertConfig(**{**_COMMON, "num_hidden_layers": 4}, local_attention=18),
        ModernBertConfig(
            **_COMMON,
            local_attention=7,
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            hidden_activation="silu",
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        ModernBertConfig(**{**_COMMON, "hidden_size": 72, "num_attention_heads": 6}, local_attention=40),
    ],
    "nomic_bert": [
        NomicBertConfig(**_COMMON),
        NomicBertConfig(**{**_COMMON, "num_attention_heads": 2}, layer_norm_eps=1e-3),
    ],
    "eurobert": [EuroBertConfig(**_COMMON), EuroBertConfig(**_COMMON, num_key_value_heads=2)],
    "gemma3": [
        Gemma3TextConfig(
            **_GEMMA,
            use_bidirectional_attention=True,
            sliding_window=17,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ],
}


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens, without those that have a meaning."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def write_encoder(config: PreTrainedConfig, folder: Path, seed: int, *, kind: Any = AutoModel) -> Path:
    """Draws the model and saves it in `folder`, which is created and returned. `kind`: which class of transformers makes it,
    for example one with a head. Weights, biases and norms are random, so that one that was left out shows."""
    model: PreTrainedModel = kind.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * _STANDARD_DEVIATION
        is_scale = parameter.dim() == 1 and name.endswith("weight")
        offset = 1.0 if is_scale and not isinstance(config, Gemma3TextConfig) else 0.0
        parameter.data.copy_(offset + values)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def reference_hidden(
    folder: Path,
    texts: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    types: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """The truth: the last hidden states of each text, by transformers, one text after the other."""
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    found = []
    for index, text in enumerate(texts):
        more = {} if types is None else {"token_type_ids": torch.tensor([types[index]])}
        found.append(model(torch.tensor([text]), **more).last_hidden_state[0])
    return found


class Encoder:
    """Our own code, or one of its stages. `folder` may also be a GGUF file."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        *,
        quantization: QuantizationConfig | None = None,
        tp: TensorParallelGroup | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self.architecture = parse_architecture(read_model_config(folder))
        self.dtype = dtype
        self.backend = get_backend("cpu", self.architecture.head_dims, BLOCK_SIZE, dtype, dtype)
        config = ModelConfig(
            folder=folder,
            name="x",
            architecture=self.architecture,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=self.architecture.max_position_embeddings,
            load_format="gguf" if folder.is_file() else "safetensors",
            seed=0,
            fingerprint="",
            quantization=quantization or QuantizationConfig(),
        )
        self.model = load_model(
            config, device=torch.device("cpu"), backend=self.backend, tp=tp or TensorParallelGroup(), stage=stage
        )
        self._num_blocks = 0

    def __call__(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """The hidden states of each text, all of them computed in one step."""
        hidden = self.run_stage(texts, types)
        assert isinstance(hidden, Tensor)
        return list(torch.split(hidden, [len(text) for text in texts]))

    @torch.inference_mode()
    def run_stage(
        self,
        texts: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        counts = np.array([len(text) for text in texts], dtype=np.int32)
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        width = -(-int(counts.max()) // BLOCK_SIZE)
        inputs = AttentionInputs(
            query_start_loc=starts,
            seq_lens=counts,
            num_computed_tokens=np.zeros_like(counts),
            block_table=1 + np.arange(len(texts) * width, dtype=np.int32).reshape(len(texts), width),
        )
        groups = self._bind(1 + len(texts) * width)
        step = ModelStep(
            _flat(texts),
            torch.cat([torch.arange(len(text)) for text in texts]),
            tuple(self.backend.metadata_builder(spec)(inputs) for spec in groups),
            intermediate=intermediate,
            token_types=None if types is None else _flat(types),
        )
        result: Tensor | IntermediateTensors = self.model(step)
        return result

    def _bind(self, num_blocks: int) -> list[Any]:
        """Gives each layer a cache that is full of NaN, and returns the specification of each KV group."""
        layers = list(self.model.cached_layers().values())
        specs = [layer.kv_cache_spec(BLOCK_SIZE, self.dtype) for layer in layers]
        groups = list(dict.fromkeys(specs))
        if num_blocks > self._num_blocks:
            for layer, spec in zip(layers, specs, strict=True):
                arena = torch.full((num_blocks, spec.block_bytes), 0xFF, dtype=torch.uint8)
                layer.bind(self.backend.layer_cache(arena, spec, 0), groups.index(spec))
            self._num_blocks = num_blocks
        return groups


def _flat(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([number for row in rows for number in row])
