"""Which rows of each tensor of the checkpoint a rank reads: together the ranks read all, and each reads its share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from inflight.config.engine import QuantizationConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.context import make_context
from inflight.models.decoder import DecoderForCausalLM
from tests.support.full_context_attention import FullContextAttention
from tests.support.model_zoo import FAMILY_CONFIGS

# words in the names of tensors that every rank reads as a whole: they are small, or all heads share their results
SHARED = (
    "norm",
    "kv_a_proj",
    "q_a_proj",
    "per_layer_",
    "layer_scalar",
    "o_proj.bias",
    "out_proj.bias",
    "down_proj.bias",
)


def rows_read(family: str, index: int, rank: int, num_ranks: int) -> dict[str, tuple[int, Counter[int]]]:
    """Name of the tensor -> its size along the dimension that is divided, and how often the rank reads each place."""
    architecture = parse_architecture(FAMILY_CONFIGS[family][index].to_dict())
    backend: Any = FullContextAttention()  # Any: a stand-in
    context = make_context(
        dtype=torch.float32,
        device=torch.device("meta"),
        tp=TensorParallelGroup(num_ranks, rank),
        backend=backend,
        quantization=QuantizationConfig(),
    )
    num_layers = architecture.num_layers
    model = DecoderForCausalLM(architecture, context, PipelineStage(0, num_layers, num_layers))
    found: dict[str, tuple[int, Counter[int]]] = {}
    for prefix, unit in model.load_units():
        for name, slot in unit.weight_slots(prefix):
            offsets = range(slot.size) if slot.rows is None else slot.rows.tolist()
            read = found.setdefault(name, (slot.shape[slot.dim], Counter()))[1]
            read.update(slot.start + offset for offset in offsets)
    return found


@pytest.mark.parametrize(
    ("family", "index", "num_ranks"),
    [
        ("llama", 6, 2),  # biases
        ("phi3", 0, 2),  # fused projections
        ("qwen3_5", 0, 2),  # recurrent layers, gates of heads
        ("qwen3_next", 0, 2),  # grouped projections
        ("lfm2", 1, 2),
        ("deepseek_v2", 1, 4),
        ("olmo2", 1, 4),  # norms of all heads together
        ("gemma4", 0, 2),
        ("glm4", 0, 2),  # rows in another order
    ],
)
def test_each_row_is_read_once(family: str, index: int, num_ranks: int) -> None:
    """A rank that is alone reads every row once. Several ranks read the same tensors, and either each of them reads all rows,
    or each reads an equal share."""
    alone = rows_read(family, index, 0, 1)
    for name, (size, read) in alone.items():
        assert read == Counter(range(size)), name
    ranks = [rows_read(family, index, rank, num_ranks) for rank in range(num_ranks)]
    for name, (size, _) in alone.items():
        parts = [each[name][1] for each in ranks]
        is_whole_norm = family == "olmo2" and ("q_norm" in name or "k_norm" in name)
        if any(word in name for word in SHARED) and not is_whole_norm:
            assert parts == [Counter(range(size))] * num_ranks, name
        elif "embed_tokens" in name or "lm_head" in name:  # the last rank has fewer rows
            assert sum(parts, Counter()) == Counter(range(size)), name
        else:
            assert sum(parts, Counter()) == Counter(range(size)), name
            assert {part.total() for part in parts} == {size // num_ranks}, name
    assert all(each.keys() == alone.keys() for each in ranks)
