"""Vision towers: embeddings of images by Inflight, and by transformers' model with the same weights, in turns.

    python -m benchmarks.vision [--shapes smolvlm,qwen3-vl-2b] [--formats bfloat16,int8] [--rounds 5]

The towers have the sizes of published models and random weights; the decoders behind them are tiny. Each image is computed
alone, by all cores. Speeds are patches per second. Inflight's int8 stands against transformers' bfloat16. The share of the
roofline is that of Inflight: the multiplications and additions that torch counts in transformers' tower, against the peak of
the processor (benchmarks.roofline). The cosine is that of our embeddings with those of transformers in float32.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, PreTrainedConfig, Qwen3VLConfig, SmolVLMConfig

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER
from benchmarks.shared.report import emit, print_table
from benchmarks.speed.roofline import Machine, measure_machine
from inflight.attention.selector import get_backend
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.vision import Grid
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.models.vision.tower import VisionTower

GOAL, ROOFLINE_GOAL = 1.2, 0.6
VOCAB_SIZE, BLOCK_SIZE = 128, 16
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


class Shape(NamedTuple):
    config: Callable[[], PreTrainedConfig]
    grids: tuple[Grid, ...]


def _smolvlm() -> PreTrainedConfig:
    """The tower of SmolVLM-256M and 500M. A tile has 512 x 512 pixels."""
    tower = {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16}
    text = {**_TEXT, "model_type": "llama", "hidden_size": 576}
    return SmolVLMConfig(vision_config=tower, text_config=text, scale_factor=4, image_token_id=VOCAB_SIZE - 1)


def _qwen3_vl() -> PreTrainedConfig:
    """The tower of Qwen3-VL-2B, with images of 512 x 512 and 1024 x 1024 pixels."""
    tower = {"hidden_size": 1024, "num_heads": 16, "depth": 24, "intermediate_size": 4096, "out_hidden_size": 2048}
    text = {**_TEXT, "model_type": "qwen3_vl_text", "hidden_size": 2048, "head_dim": 128}
    return Qwen3VLConfig(
        vision_config={**tower, "deepstack_visual_indexes": [0, 1, 2]}, text_config=text, image_token_id=VOCAB_SIZE - 1
    )


SHAPES = {"smolvlm": Shape(_smolvlm, ((1, 32, 32),)), "qwen3-vl-2b": Shape(_qwen3_vl, ((1, 32, 32), (1, 64, 64)))}


def model_folder(name: str, models_folder: Path) -> Path:
    """The folder of a model of this shape with random weights, made if it is not there."""
    folder = models_folder / f"vision-{name}"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(SHAPES[name].config()).save_pretrained(folder)
    return folder


def load_tower(folder: Path, weights: str) -> VisionTower:
    architecture = parse_architecture(read_model_config(folder))
    dtype = "bfloat16" if weights == "int8" else weights
    torch_dtype = getattr(torch, dtype)
    config = ModelConfig(
        folder=folder,
        name=folder.name,
        architecture=architecture,
        dtype=dtype,
        max_model_len=architecture.max_position_embeddings,
        load_format="safetensors",
        seed=0,
        fingerprint="",
        quantization=QuantizationConfig(layers="int8" if weights == "int8" else None),
    )
    backend = get_backend("cpu", architecture.head_dims, BLOCK_SIZE, torch_dtype, torch_dtype)
    tower = load_model(config, device=torch.device("cpu"), backend=backend, tp=TensorParallelGroup()).tower
    assert tower is not None
    return tower


def draw(tower: VisionTower, grid: Grid) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if tower.spec.kind == "idefics3":
        return torch.randn(3, grid[1] * 16, grid[2] * 16, generator=generator)
    return torch.randn(grid[0] * grid[1] * grid[2], tower.spec.patch_features, generator=generator)


def reference(model: Any, pixels: Tensor, grid: Grid) -> Tensor:  # Any: each family has a class of its own
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
    if pixels.dim() == 3:
        given = {"pixel_values": pixels[None, None]}
    found: Tensor = model.get_image_features(**given).pooler_output[0]
    return found


def speed(encode: Callable[[], object], num_patches: int, repeats: int) -> Callable[[], float]:
    """Patches per second."""

    def timed() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(repeats):
                encode()
        return repeats * num_patches / (time.perf_counter() - begin)

    return timed


def count_operations(encode: Callable[[], object]) -> int:
    """Multiplications and additions of matrix products and attention."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encode()
    return int(counter.get_total_flops())


def measure(name: str, weights: str, rounds: int, models_folder: Path, machine: Machine) -> list[list[str]]:
    folder = model_folder(name, models_folder)
    dtype = torch.bfloat16 if weights == "int8" else getattr(torch, weights)
    tower = load_tower(folder, weights)
    exact = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    peer = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    rows = []
    for grid in SHAPES[name].grids:
        pixels = draw(tower, grid)
        with torch.inference_mode():
            truth = reference(exact, pixels, grid)
            found = tower.encode(pixels, grid)[:, : truth.shape[1]].float()
        cosine = float(torch.nn.functional.cosine_similarity(found, truth).min())
        num_patches = grid[0] * grid[1] * grid[2]
        case = f"{name} {weights}, {num_patches} patches"
        emit(benchmark="vision", case=case, smallest_cosine=round(cosine, 6))
        repeats = max(1, 4096 // num_patches)
        sides = (
            speed(partial(reference, peer, pixels, grid), num_patches, repeats),
            speed(partial(tower.encode, pixels, grid), num_patches, repeats),
        )
        row = compare_in_turns("vision", case, *sides, rounds)
        per_patch = count_operations(partial(reference, peer, pixels, grid)) / num_patches
        share = float(row[2]) * per_patch / machine.peak("int8" if weights == "int8" else "bf16")
        emit(benchmark="vision", case=case, operations_per_patch=round(per_patch), share_of_roofline=round(share, 3))
        rows.append([*row, f"{share:.2f}", f"{cosine:.5f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings of images, against transformers.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="[%(default)s]")
    parser.add_argument("--formats", default="bfloat16,int8", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where models are kept [%(default)s]"
    )
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    machine = measure_machine()
    rows = [
        row
        for shape in args.shapes.split(",")
        for weights in args.formats.split(",")
        for row in measure(shape, weights, args.rounds, args.models, machine)
    ]
    roofline = f"share of the roofline (goal {ROOFLINE_GOAL})"
    print_table(["case", "transformers", "inflight", f"ratio (goal {GOAL})", roofline, "cosine"], rows)


if __name__ == "__main__":
    main()
