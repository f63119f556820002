"""The estimate of a rank's weights is what the model's tensors take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import ModelConfig, ParallelConfig, QuantizationConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.config.partition import check_tensor_parallel_size, resolve_partition
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.weight_size import check_weights_fit, weight_bytes
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError, OutOfMemoryError
from inflight.layers.context import make_context
from inflight.models.decoder import DecoderForCausalLM
from tests.support.full_context_attention import FullContextAttention
from tests.support.model_zoo import FAMILY_CONFIGS

ARCHITECTURES = [parse_architecture(config.to_dict()) for configs in FAMILY_CONFIGS.values() for config in configs]
GIB = 2**30


def model_config(architecture: ModelArchitecture, **more: Any) -> ModelConfig:
    defaults = {"dtype": "bfloat16", "load_format": "safetensors"}
    return ModelConfig(
        folder=Path("m"),
        name="m",
        architecture=architecture,
        max_model_len=64,
        seed=0,
        fingerprint="",
        **defaults | more,
    )


def parallel_config(architecture: ModelArchitecture, tp_size: int = 1, pp_size: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        pipeline_layer_partition=resolve_partition(None, architecture, pp_size),
        distributed_executor_backend="mp",
    )


def allocated(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> int:
    """Bytes of the tensors of one rank, before they are brought into another form."""
    backend: Any = FullContextAttention()  # Any: a stand-in
    context = make_context(
        dtype=getattr(torch, model.dtype),
        device=torch.device("meta"),
        tp=TensorParallelGroup(parallel.tensor_parallel_size, 0),
        backend=backend,
        quantization=QuantizationConfig(),
    )
    stage = pipeline_stage(parallel.pipeline_layer_partition, pp_rank)
    made = DecoderForCausalLM(model.architecture, context, stage)
    return sum(parameter.numel() * parameter.element_size() for parameter in made.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_it_is_what_the_tensors_take(architecture: ModelArchitecture, dtype: str) -> None:
    model = model_config(architecture, dtype=dtype)
    for tp_size, pp_size in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        try:
            check_tensor_parallel_size(tp_size, architecture)
            parallel = parallel_config(architecture, tp_size, pp_size)
        except ConfigError:
            continue
        for pp_rank in range(pp_size):
            assert weight_bytes(model, parallel, pp_rank) == allocated(model, parallel, pp_rank)


def quantized(architecture: ModelArchitecture, layers: str | None, head: str | None) -> int:
    model = model_config(architecture, quantization=QuantizationConfig(layers=layers, head=head, group_size=32))
    return weight_bytes(model, parallel_config(architecture), 0)


def test_fewer_bits() -> None:
    architecture = replace(ARCHITECTURES[0], tie_word_embeddings=False)
    plain = quantized(architecture, None, None)
    assert (architecture.hidden_size, architecture.layers[0].mlp.size, architecture.head_dims[0]) == (64, 112, 16)
    # q, k, v: 64 + 32 + 32 rows; gate, up: 224; o and down: 64 rows each, of 64 and 112 features
    per_layer = (128 + 224) * 64 + 64 * 64 + 64 * 112
    rows, num_layers = 128 + 224 + 64 + 64, architecture.num_layers
    assert plain - quantized(architecture, "fp8", None) == num_layers * (per_layer - 4 * rows)
    groups = (128 + 224 + 64) * 2 + 64 * 3  # of 112 features three whole groups; the rest is not counted
    assert plain - quantized(architecture, "int4", None) == num_layers * (per_layer * 3 // 2 - 4 * groups)
    head = architecture.vocab_size * 64
    assert plain - quantized(architecture, None, "fp8") == head - 4 * architecture.vocab_size
    tied = replace(architecture, tie_word_embeddings=True)
    assert plain - quantized(tied, None, None) == 2 * head
    assert quantized(tied, None, "fp8") - quantized(tied, None, None) == head + 4 * architecture.vocab_size


def test_a_quantized_checkpoint_is_taken_to_be_small() -> None:
    architecture = replace(ARCHITECTURES[0], weight_format="gptq")
    parallel = parallel_config(architecture)
    least = weight_bytes(model_config(architecture), parallel, 0)
    assert least < quantized(replace(architecture, weight_format="plain"), "int4", "int4")
    assert least == weight_bytes(model_config(architecture, load_format="gguf"), parallel, 0)
    drawn = model_config(architecture, load_format="dummy")  # from the shapes, as floats
    assert weight_bytes(drawn, parallel, 0) == allocated(drawn, parallel, 0)


def refusal(num_bytes: int, budget_bytes: int, free_bytes: int, memory_utilization: float = 0.9) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        check_weights_fit(
            num_bytes,
            budget_bytes=budget_bytes,
            free_bytes=free_bytes,
            total_bytes=24 * GIB,
            memory_utilization=memory_utilization,
        )
    return str(caught.value)


def test_weights_that_do_not_fit_are_refused_with_what_to_do() -> None:
    text = refusal(60 * GIB, 21 * GIB, 23 * GIB)
    assert text == (
        "the weights of a rank are 60.00 GiB, but the engine may use 21.00 GiB of its GPU, which has 24.00 GiB, 23.00 GiB of "
        "them free (gpu_memory_utilization=0.9); set quantization, raise tensor_parallel_size or "
        "pipeline_parallel_size, or use a larger GPU"
    )
    assert "; raise gpu_memory_utilization=0.5, set" in refusal(15 * GIB, 12 * GIB, 23 * GIB, 0.5)
    assert "; end other programs that use the GPU, set" in refusal(15 * GIB, 10 * GIB, 10 * GIB)


def test_weights_that_fit() -> None:
    check_weights_fit(5, budget_bytes=5, free_bytes=6, total_bytes=7, memory_utilization=0.9)
