from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from inflight.attention.selector import get_backend
from inflight.config import weight_room
from inflight.config.architecture import ModelArchitecture
from inflight.config.cuda_driver import Gpu
from inflight.config.engine import QuantizationConfig
from inflight.config.machine import Machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.config.safetensors_file import read_header
from inflight.config.unknown_family import describe_model
from inflight.config.weight_room import Beside, Request, Room, check_room, find_room
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import OutOfMemoryError
from inflight.layers.context import make_context
from inflight.models.make_decoder import make_decoder
from tests.support.model_zoo import FAMILY_CONFIGS
from tests.support.vision_models import VISION_CONFIGS, write_vision_model

ARCHITECTURE = replace(parse_architecture(FAMILY_CONFIGS["llama"][0].to_dict()), tie_word_embeddings=False)
CPU = Machine(device="cpu", num_cores=2, dtypes=("bfloat16", "float32"))
GIB = 1 << 30


def save(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.mlp.up_proj.weight": (40, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "lm_head.weight": (100, 8),
        "model.visual.blocks.0.weight": (1000, 8),  # of a part that is not loaded
    }
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors")


def room(
    folder: Path, architecture: ModelArchitecture = ARCHITECTURE, dtype: str = "auto", quantization: str = ""
) -> Room:
    found = find_room(folder, architecture, dtype, quantization or None)
    assert found is not None
    return found


def test_what_the_headers_say(tmp_path: Path) -> None:
    save(tmp_path)
    bfloat16 = replace(ARCHITECTURE, dtype="bfloat16")
    int8 = 2 * 808 + 320 + 800
    int4 = 2 * 808 + 320 * 9 // 16 + 800  # a scale and an offset of two bytes for 64 weights; the head in int8
    assert room(tmp_path, bfloat16) == Room(2 * (800 + 320 + 8 + 800), Beside(0, {"int8": int8, "int4": int4}))
    assert room(tmp_path, bfloat16, dtype="float32").num_bytes == 4 * (800 + 320 + 8 + 800)
    assert room(tmp_path, bfloat16, quantization="int8") == Room(int8, Beside(0, {"int4": int4}))
    assert room(tmp_path, bfloat16, quantization="int4") == Room(2 * 808 + 560)
    tied = replace(bfloat16, tie_word_embeddings=True)
    assert room(tmp_path, tied).num_bytes == 2 * (800 + 320 + 8)  # one table for both
    stored = replace(bfloat16, weight_format="gptq")
    assert room(tmp_path, stored) == Room(int(0.9 * 2 * (800 + 320 + 8 + 800)))


def test_routers_stay_floats_and_layers_for_drafts_are_not_loaded(tmp_path: Path) -> None:
    shapes = {
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (40, 8),
        "model.layers.1.mlp.gate.weight": (40, 8),
    }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    architecture = replace(ARCHITECTURE, unread=("model.layers.1.",))
    assert room(tmp_path, architecture, quantization="int4") == Room(4 * 32 + 320 // 2, Beside(320 // 2))


def test_weights_in_mxfp4_keep_their_bits(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
        "model.layers.0.mlp.experts.gate_up_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**FAMILY_CONFIGS["gpt_oss"][0].to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    found = room(tmp_path, parse_architecture(config))
    num_bytes = int(0.9 * (4 * 64 * 32 + 4 * 64 * 2))
    assert found == Room(num_bytes, Beside(num_bytes))


def test_of_a_hub_id_the_index_says_it(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 8000}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    bfloat16 = replace(ARCHITECTURE, dtype="bfloat16")
    assert room(tmp_path, bfloat16) == Room(8000, Beside(0, {"int8": 4000, "int4": 2250}))
    assert room(tmp_path, bfloat16, dtype="float32").num_bytes == 16000
    assert room(tmp_path, replace(bfloat16, weight_format="awq")) == Room(7200)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gemma4", "lfm2_moe"])
def test_of_a_hub_id_in_fp8_the_sizes_say_it(tmp_path: Path, family: str) -> None:
    """Linear layers have one byte for each weight, the embedding has two, and all of them get two. The sum of the bytes in the
    index does not say how many are which."""
    config = FAMILY_CONFIGS[family][-1].to_dict() | {
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    }
    architecture = parse_architecture(config)
    model = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family][-1])
    is_linear = {name: "_proj" in name for name, _ in model.named_parameters()}
    total = sum(each.numel() * (1 if is_linear[name] else 2) for name, each in model.named_parameters())
    needed = sum(2 * each.numel() for each in model.parameters())
    index = {"metadata": {"total_size": total}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert 0.9 * needed < room(tmp_path, architecture).num_bytes <= needed


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"metadata": {"total_size": "many"}}', '{"metadata": null}'])
def test_where_nothing_says_it_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert find_room(tmp_path, ARCHITECTURE, "auto", None) is None
    (tmp_path / "model.safetensors").touch()  # a damaged file
    assert find_room(tmp_path, ARCHITECTURE, "auto", None) is None


def refusal(found: Room, free: int, monkeypatch: pytest.MonkeyPatch, request: Request | None = None) -> str:
    monkeypatch.setattr(weight_room, "available_bytes", lambda: free)
    with pytest.raises(OutOfMemoryError) as caught:
        check_room(found, CPU, request)
    return str(caught.value)


def in_formats(num_bytes: int, expert_bytes: int = 0, **smaller: int) -> Room:
    return Room(num_bytes, Beside(expert_bytes, smaller))


def test_the_error_has_the_numbers_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(in_formats(3 * GIB, int4=GIB), 2 * GIB, monkeypatch)
    assert (
        "3.00 GiB" in text
        and "2.00 GiB" in text
        and "--quantization int4), which needs about 1.00 GiB and fits" in text
    )
    assert "does not fit either" not in text and "int8" not in text
    assert "does not fit either" in refusal(in_formats(9 * GIB, int4=3 * GIB), 2 * GIB, monkeypatch)
    assert "int4" not in refusal(Room(3 * GIB), 2 * GIB, monkeypatch)
    text = refusal(in_formats(3 * GIB, int4=GIB)._replace(num_replicas=2), 5 * GIB, monkeypatch)
    assert "2 replicas" in text and "6.00 GiB" in text and "data_parallel_size" in text and "about 2.00 GiB" in text
    assert "experts" not in text
    text = refusal(in_formats(5 * GIB, 4 * GIB, int4=GIB), 2 * GIB, monkeypatch)
    assert "5.00 GiB of memory (4.00 GiB of experts and 1.00 GiB of the rest)" in text
    check_room(in_formats(2 * GIB, int4=GIB), CPU)


def test_the_error_has_the_kv_cache_and_which_format_fits_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(ARCHITECTURE, GIB // 1024, "bfloat16", "bfloat16")
    assert request.num_bytes == 2 * ARCHITECTURE.num_layers * 2 * 2 * 16 * GIB // 1024  # keys and values of two heads
    request = request._replace(num_tokens=request.num_tokens * GIB // request.num_bytes)  # a KV cache of 1 GiB
    found = in_formats(8 * GIB, int8=4 * GIB, int4=2 * GIB)
    verdicts = {
        7.9: ("fits", "fits"),
        4.5: ("fits with a smaller max_model_len", "fits"),
        3: ("does not fit either", "fits"),
        2.9: ("does not fit either", "fits with a smaller max_model_len"),
        1: ("does not fit either", "does not fit either"),
    }
    for free, (int8, int4) in verdicts.items():
        text = refusal(found, int(free * GIB), monkeypatch, request)
        assert f"and the KV cache 1.00 GiB for one request of max_model_len={request.num_tokens}, but only" in text
        assert f"(--quantization int8), which needs about 4.00 GiB and {int8}, set" in text
        assert (
            f"(--quantization int4), which needs about 2.00 GiB and {int4}, end" in text or "raise the memory" in text
        )
    text = refusal(found._replace(num_replicas=2), 8 * GIB, monkeypatch, request)
    assert "the KV cache 2.00 GiB for one request of max_model_len=" in text and "in each" in text


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_5", "lfm2_moe", "gemma4", "qwen3_moe"]
)
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_the_kv_cache_is_as_large_as_the_engines(family: str, kv_cache_dtype: str) -> None:
    """Against what the layers themselves say."""
    architecture = parse_architecture(FAMILY_CONFIGS[family][0].to_dict())
    num_tokens = 1000
    context = make_context(
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        tp=TensorParallelGroup(),
        backend=get_backend("cpu", architecture.head_dims, 16, torch.bfloat16, getattr(torch, kv_cache_dtype)),
        quantization=QuantizationConfig(),
    )
    model = make_decoder(
        architecture, None, context, PipelineStage(0, architecture.num_layers, architecture.num_layers)
    )
    needed = 0
    for layer in model.cached_layers().values():
        spec = layer.kv_cache_spec(16, getattr(torch, kv_cache_dtype))
        num_kept = min(num_tokens, spec.sliding_window or num_tokens)
        needed += spec.state_bytes if spec.is_state else num_kept * spec.block_bytes // 16
    assert Request(architecture, num_tokens, "bfloat16", kv_cache_dtype).num_bytes == needed > 0


def test_caches_and_host_pools_of_all_ranks_and_replicas_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, `inflight serve --check` looked at the weights only."""
    room = Room(3 * GIB, num_ranks=2, num_replicas=2, kv_cache_bytes=GIB, host_pool_bytes=GIB)
    text = refusal(room, 11 * GIB, monkeypatch)
    assert (
        "6.00 GiB of memory" in text
        and "6.00 GiB of weights" in text
        and "11.00 GiB" in text
        and "5.00 GiB together" in text
    )
    monkeypatch.setattr(weight_room, "available_bytes", lambda: 12 * GIB)
    check_room(room, CPU)


@pytest.mark.parametrize("is_limited", [True, False])
def test_in_a_container_its_limit_is_named(is_limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_room, "is_limited", lambda: is_limited)
    assert ("limit of the container" in refusal(Room(3), 2, monkeypatch)) is is_limited


def test_on_gpus_the_part_of_a_rank_must_fit() -> None:
    gpu = Gpu(name="H200", compute_capability=(9, 0), num_multiprocessors=132, total_memory_bytes=10 * GIB)
    machine = Machine(device="cuda", num_cores=2, dtypes=("bfloat16",), gpus=(gpu, gpu))
    check_room(Room(20 * GIB, num_ranks=2), machine)
    with pytest.raises(OutOfMemoryError, match="tensor_parallel_size"):
        check_room(Room(20 * GIB + 2, num_ranks=2), machine)


def test_the_tower_counts_unless_it_is_left_out(tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS["smolvlm"][0], tmp_path / "model", seed=0)
    whole, text = (
        describe_model(json.loads((folder / "config.json").read_text()), "inflight", language_model_only=alone)
        for alone in (False, True)
    )
    rooms = [find_room(folder, each, "auto", None) for each in (whole, text)]
    assert rooms[0] is not None and rooms[1] is not None
    stored = read_header(folder / "model.safetensors")
    of_tower = sum(
        math.prod(tensor.shape) for name, tensor in stored.items() if "vision" in name or "connector" in name
    )
    assert rooms[0].num_bytes - rooms[1].num_bytes == 4 * of_tower
    assert whole.vision is not None
    assert 0.5 * of_tower < whole.vision.num_weights < of_tower


def test_replicas_that_divide_the_experts_need_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Room(3 * GIB, Beside(2 * GIB), num_replicas=3)
    assert "need 9.00 GiB of memory (6.00 GiB of experts and 3.00 GiB" in refusal(copied, 4 * GIB, monkeypatch)
    once = copied._replace(num_expert_copies=1)
    assert "need 5.00 GiB of memory (2.00 GiB of experts and 3.00 GiB" in refusal(once, 4 * GIB, monkeypatch)
    monkeypatch.setattr(weight_room, "available_bytes", lambda: 6 * GIB)
    check_room(once, CPU)
