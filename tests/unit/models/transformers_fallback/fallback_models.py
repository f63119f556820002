"""Small models that the code of transformers computes on Inflight's caches, and steps of several sequences through them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.config.engine import ModelConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.config.unknown_family import describe_model
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import ModelStep
from inflight.models.transformers_fallback.model import TransformersForCausalLM
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.model_zoo import FALLBACK_CONFIGS, VOCAB_SIZE, reference_model, write_model

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 14, 64
# the tokens of three sequences in each step: prompts, single tokens, and parts that end within a block and at its end
STEPS = [(21, 5, 0), (1, 11, 7), (1, 1, 30), (9, 0, 1), (0, 3, 1)]
TABLES = np.array([[7, 3, 11, 4], [2, 9, 5, 13], [12, 1, 6, 8]], dtype=np.int32)


def write(folder: Path, config: PreTrainedConfig | str) -> tuple[Path, PreTrainedModel]:
    """A model of random weights, and transformers' own model of the same weights: the truth. `config`: also a family's name."""
    chosen = FALLBACK_CONFIGS[config][0] if isinstance(config, str) else config
    written = write_model(chosen, folder / "model", seed=0)
    return written, reference_model(written)


def model_config(folder: Path, **fields: Any) -> ModelConfig:
    content = json.loads((folder / "config.json").read_text())
    defaults: dict[str, Any] = {
        "folder": folder,
        "name": "x",
        "architecture": describe_model(content, "transformers"),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "load_format": "safetensors",
        "seed": 5,
        "fingerprint": "",
    }
    return ModelConfig(**{**defaults, **fields})


def load(
    folder: Path,
    *,
    tp: TensorParallelGroup | None = None,
    stage: PipelineStage | None = None,
    backend: AttentionBackend | None = None,
    **fields: Any,
) -> TransformersForCausalLM:
    """`fields`: of `ModelConfig`."""
    model = load_model(
        model_config(folder, **fields),
        device=torch.device("cpu"),
        backend=backend or TorchSdpaBackend(),
        tp=tp or TensorParallelGroup(),
        stage=stage,
    )
    assert isinstance(model, TransformersForCausalLM)
    return model


class Session:
    """Sequences of one model, on caches with scattered blocks. A model has one or several stages."""

    def __init__(self, *stages: TransformersForCausalLM, num_states: int = 1) -> None:
        self.stages, self.done = stages, np.zeros(len(TABLES), dtype=np.int32)
        self.arenas: list[Tensor] = []
        self._specs = []
        for stage in stages:
            layers = list(stage.cached_layers().values())
            every = [layer.kv_cache_spec(BLOCK_SIZE, stage.dtype, num_states) for layer in layers]
            groups = list(dict.fromkeys(every))
            self._specs.append(groups)
            for layer, spec in zip(layers, every, strict=True):
                # a state begins with zeros, whatever is in its block
                arena = torch.full((NUM_BLOCKS, spec.block_bytes), 255 if spec.is_state else 0, dtype=torch.uint8)
                assert stage.backend is not None
                layer.bind(stage.backend.layer_cache(arena, spec, 0), groups.index(spec))
                self.arenas.append(arena)

    @torch.no_grad()
    def step(
        self,
        sequences: Sequence[Tensor],
        counts: Sequence[int],
        rows: Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor | IntermediateTensors:
        """The last stage's result for the next `counts` tokens of each sequence."""
        chosen = [number for number, count in enumerate(counts) if count]
        sizes = np.array([counts[number] for number in chosen], dtype=np.int32)
        before = self.done[chosen]
        self.done[chosen] += sizes
        inputs = AttentionInputs(
            query_start_loc=np.concatenate(([0], sizes.cumsum())).astype(np.int32),
            seq_lens=before + sizes,
            num_computed_tokens=before,
            block_table=TABLES[chosen],
        )
        spans = list(zip(chosen, before, before + sizes, strict=True))
        ids = torch.cat([sequences[number][start:end] for number, start, end in spans]).int()
        positions = torch.from_numpy(np.concatenate([np.arange(start, end) for _, start, end in spans])).int()
        passed: Tensor | IntermediateTensors | None = None
        for stage, specs in zip(self.stages, self._specs, strict=True):
            assert stage.backend is not None and not isinstance(passed, Tensor)
            metadata = tuple(stage.backend.metadata_builder(spec)(inputs) for spec in specs)
            passed = stage(ModelStep(ids, positions, metadata, rows, layers, passed))
        assert passed is not None
        return passed

    @torch.no_grad()
    def run(self, sequences: Sequence[Tensor], steps: Sequence[Sequence[int]] = STEPS) -> list[Tensor]:
        """The logits of all tokens of each sequence."""
        found: list[list[Tensor]] = [[] for _ in sequences]
        for counts in steps:
            hidden = self.step(sequences, counts)
            assert isinstance(hidden, Tensor)
            logits = self.stages[-1].compute_logits(hidden)
            for pieces, piece in zip(found, torch.split(logits, list(counts)), strict=True):
                pieces.append(piece)
        return [torch.cat(pieces) for pieces in found]


def draw_sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (sum(counts),), generator=generator) for counts in zip(*STEPS, strict=True)]


@torch.no_grad()
def assert_agree(found: Sequence[Tensor], sequences: Sequence[Tensor], truth: PreTrainedModel) -> None:
    """The logits are those of transformers, up to the roundings of float32."""
    for logits, sequence in zip(found, sequences, strict=True):
        wanted = truth(sequence[None]).logits[0]
        assert wanted.std() > 0.2, "logits that are all alike would agree whatever the model does"
        assert logits.shape == wanted.shape and logits.dtype == torch.float32
        assert relative_difference(logits, wanted) < FLOAT32_TOLERANCE
