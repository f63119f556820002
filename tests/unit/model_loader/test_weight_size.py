"""The size of the weights of a model that has not been loaded is what the loaded model holds."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.experts import MoeSpec
from inflight.config.parse_architecture import parse_architecture
from inflight.config.partition import check_tensor_parallel_size, resolve_partition
from inflight.config.pipeline_stage import PipelineStage, pipeline_stage
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError
from inflight.layers import context
from inflight.layers.linear import Linear
from inflight.model_loader.loader import load_model
from inflight.model_loader.weight_size import WeightSizes, weight_bytes, weight_sizes
from inflight.models.causal_lm import CausalLM
from inflight.models.decoder import DecoderForCausalLM
from tests.support.full_context_attention import FullContextAttention
from tests.support.model_zoo import FAMILY_CONFIGS

ARCHITECTURES = [parse_architecture(config.to_dict()) for configs in FAMILY_CONFIGS.values() for config in configs]
BACKEND: Any = FullContextAttention()  # Any: a stand-in


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


def held(model: CausalLM) -> int:
    """Bytes of the tensors of a loaded model that multiplies in plain torch: parameters, and what its products refer to."""
    tensors: list[object] = list(model.parameters())
    for module in model.modules():
        for value in vars(module).values():
            if inspect.isfunction(value):
                tensors += inspect.getclosurevars(value).nonlocals.values()
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)}.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_it_is_what_the_loaded_model_holds(
    architecture: ModelArchitecture, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "load_kernels", lambda: None)
    config = model_config(architecture, dtype=dtype, load_format="dummy")
    for tp_size, pp_size in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)) if dtype == "bfloat16" else ((1, 1), (2, 2)):
        try:
            check_tensor_parallel_size(tp_size, architecture)
            partition = resolve_partition(None, architecture, pp_size)
        except ConfigError:
            continue
        for pp_rank in range(pp_size):
            sizes: list[WeightSizes] = []
            model = load_model(
                config,
                device=torch.device("cpu"),
                backend=BACKEND,
                tp=TensorParallelGroup(tp_size, 0),
                stage=pipeline_stage(partition, pp_rank),
                check_size=sizes.append,
            )
            assert [each.rank for each in sizes] == [held(model)]
            if pp_size == 1:
                assert sizes[0].whole == sizes[0].rank
            else:
                assert sizes[0].whole > sizes[0].rank
            smaller = sizes[0].beside.smaller
            assert smaller["int4"] < smaller["int8"] < sizes[0].whole


def made(config: ModelConfig) -> CausalLM:
    """Without memory, and not loaded."""
    architecture = config.architecture
    on_meta = context.make_context(
        dtype=getattr(torch, config.dtype),
        device=torch.device("meta"),
        tp=TensorParallelGroup(),
        backend=BACKEND,
        quantization=QuantizationConfig(),
    )
    stage = PipelineStage(0, architecture.num_layers, architecture.num_layers)
    return DecoderForCausalLM(architecture, on_meta, stage)


def size(config: ModelConfig) -> int:
    return weight_bytes(made(config), config)


def quantized(architecture: ModelArchitecture, layers: str | None, head: str | None) -> int:
    quantization = QuantizationConfig(layers=layers, head=head, group_size=32)
    return size(model_config(architecture, quantization=quantization))


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


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_each_linear_weight_has_a_scale_for_each_row(architecture: ModelArchitecture) -> None:
    linears = [each for each in made(model_config(architecture)).modules() if isinstance(each, Linear)]
    shapes = [each.weight.shape for each in linears if not each.keeps_floats]
    fewer = sum(num_rows * (num_columns - 4) for num_rows, num_columns in shapes)
    assert quantized(architecture, None, None) - quantized(architecture, "int8", None) == fewer


def test_a_quantized_checkpoint_is_taken_to_be_small() -> None:
    architecture = replace(ARCHITECTURES[0], weight_format="gptq")
    plain = replace(architecture, weight_format="plain")
    least = size(model_config(architecture))
    assert least < quantized(plain, "int4", "int4")
    assert least == size(model_config(architecture, load_format="gguf"))
    gguf = model_config(architecture, load_format="gguf")
    model = made(gguf)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    # if the header says more: 90 % of it
    assert weight_bytes(model, gguf, 8.0) == least + int(linear * (7.2 - 4.25) / 8)
    assert weight_bytes(model, gguf, 4.0) == least
    # drawn from the shapes, as floats
    assert size(model_config(architecture, load_format="dummy")) == size(model_config(plain))


def test_which_of_the_bytes_are_experts() -> None:
    config = model_config(parse_architecture(FAMILY_CONFIGS["qwen3_moe"][0].to_dict()))
    model = made(config)
    spec = config.architecture.layers[0].mlp
    assert isinstance(spec, MoeSpec)
    weights = 3 * spec.num_experts * spec.size * config.architecture.hidden_size * config.architecture.num_layers
    found = weight_sizes(model, model, config)
    assert found.beside.expert_bytes == weights * getattr(torch, config.dtype).itemsize < found.whole
