"""Models that transformers' code computes wrongly on a KV cache do not start: in each dtype, with huge values, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3nTextConfig

from inflight.errors import UnsupportedModelError
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.stored_parts import StoredParts
from tests.e2e.greedy_truth import Comparison
from tests.e2e.test_transformers_fallback import GREEDY, SMALL, prompts, start
from tests.support.model_zoo import FALLBACK_CONFIGS, VOCAB_SIZE, reference_model, write_model

# A Llama whose layers also mix each token with the tokens before it, by a convolution that keeps no state.
MIXER = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

class MixerConfig(LlamaConfig):
    model_type = "mixer"
    def __init__(self, width=2, before=False, outlier=0.0, scale=1.0, **more):
        self.width, self.before, self.outlier, self.scale = width, before, outlier, scale
        super().__init__(**more)

class MixerLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.before, self.scale, size = config.before, config.scale, config.hidden_size
        self.outlier = config.outlier if layer_idx == 0 else 0.0
        self.conv = nn.Conv1d(size, size, config.width, padding=config.width - 1, groups=size)
    def mix(self, hidden):
        mixed = self.conv(hidden.transpose(1, 2))[..., :hidden.shape[1]].transpose(1, 2)
        return hidden + self.scale * mixed
    def forward(self, hidden_states, position_ids=None, **more):
        if self.outlier:
            first = torch.zeros_like(hidden_states)
            first[..., 5] = self.outlier
            hidden_states = torch.where((position_ids == 0)[..., None], hidden_states + first, hidden_states)
        if self.before:
            hidden_states = self.mix(hidden_states)
        hidden_states = super().forward(hidden_states, position_ids=position_ids, **more)
        return hidden_states if self.before else self.mix(hidden_states)

class MixerForCausalLM(LlamaForCausalLM):
    config_class = MixerConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(MixerLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()
"""


def write_mixer(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    config = {
        "model_type": "mixer",
        "architectures": ["MixerForCausalLM"],
        "auto_map": {"AutoConfig": "mixer.MixerConfig", "AutoModelForCausalLM": "mixer.MixerForCausalLM"},
        **SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mixer.py").write_text(MIXER)
    return folder


def write_weights(folder: Path) -> Path:
    """Wide weights for the model, so that every part of a layer changes the result."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        for name, weight in model.named_parameters():
            weight.data = torch.randn_like(weight) * 0.15 + (1 if "norm" in name else 0)
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "more", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
@pytest.mark.parametrize(
    "fields",
    [
        {"width": 2},
        {"width": 3},
        {"width": 4},
        {"width": 2, "before": True},
        {"width": 3, "before": True, "outlier": 300.0},
        {"width": 3, "before": True, "outlier": 1000.0},
        {"width": 3, "before": True, "outlier": 5000.0},
        {"width": 3, "outlier": 5000.0},
    ],
    ids=str,
)
def test_a_convolution_without_a_state_is_refused(tmp_path: Path, more: dict[str, Any], fields: dict[str, Any]) -> None:
    folder = write_weights(write_mixer(tmp_path / "model", **fields))
    with pytest.raises(UnsupportedModelError, match=r"decoder layer 0.* differs"):
        start(folder, trust_remote_code=True, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outlier", [0.0, 300.0, 5000.0])
def test_the_same_model_without_the_convolution_starts(tmp_path: Path, dtype: str, outlier: float) -> None:
    folder = write_weights(write_mixer(tmp_path / "model", scale=0.0, outlier=outlier))
    with start(folder, dtype=dtype, trust_remote_code=True) as llm:
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)


def small_gemma3n() -> Gemma3nTextConfig:
    return Gemma3nTextConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=[96, 96],
        activation_sparsity_pattern=[0.95, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        laurel_rank=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )


def test_an_mlp_that_needs_its_whole_width_is_not_divided(tmp_path: Path) -> None:
    folder = write_model(small_gemma3n(), tmp_path / "model", seed=0)
    truth, comparison = reference_model(folder), Comparison()
    with start(folder, tensor_parallel_size=2, distributed_executor_backend="uni") as llm:
        for output in llm.generate(prompts(), GREEDY, use_tqdm=False):
            comparison.add(truth, output.prompt_token_ids, output.outputs[0].token_ids)


def test_a_layer_that_enlarges_roundings_starts_in_bfloat16(tmp_path: Path) -> None:
    """A threshold among the values of a token decides which of them count."""
    folder = write_model(small_gemma3n(), tmp_path / "model", seed=0)
    with start(folder, dtype="bfloat16") as llm:
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)


def test_a_division_that_changes_the_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.models.transformers_fallback.build.needs_whole_width", lambda module: False)
    folder = write_model(small_gemma3n(), tmp_path / "model", seed=0)
    with pytest.raises(UnsupportedModelError, match="decoder layer 0 differs"):
        start(folder, tensor_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.parametrize(
    "more", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_weights_that_are_loaded_wrongly_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """The rows of a projection are those of another head."""
    folder = write_model(FALLBACK_CONFIGS["olmo2"][0], tmp_path / "model", seed=0)
    finish = ColumnParallelLinear.finish_loading

    def swapped(self: ColumnParallelLinear) -> None:
        if "q_proj" in self.parts:
            self.weight.data = torch.cat(list(self.stored.assemble(self.weight.data)))  # type: ignore[arg-type]
            self.stored = StoredParts(self.method, self.dtype)
            self.weight.data[:32] = self.weight.data[:32].roll(16, 0)
        finish(self)

    monkeypatch.setattr(ColumnParallelLinear, "finish_loading", swapped)
    with pytest.raises(UnsupportedModelError, match="decoder layer 0 differs"):
        start(folder, **more)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("more", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_random_and_quantized_weights_are_those_of_the_truth(
    tmp_path: Path, tp_size: int, more: dict[str, Any]
) -> None:
    FALLBACK_CONFIGS["qwen3_moe"][0].save_pretrained(tmp_path)
    with start(tmp_path, load_format="dummy", tensor_parallel_size=tp_size, **more) as llm:
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)
