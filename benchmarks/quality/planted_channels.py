"""What the quantization of activations costs in accuracy if some of their channels are far larger than the others.

    python -m benchmarks.planted_channels [--formats int8 int4] [--channels 1 2 4 8] [--factors 10 100 1000] [--seeds 3]

Trained models have such channels, random ones have not, so they are planted: in a small model with random weights, a few random
channels of each norm's weight are multiplied by a factor. A CPU quantizes the rows that a linear layer is given to 8 bits.

The error is the RMS difference of log-probabilities from transformers' forward in float64, over all tokens of the vocabulary at
each position. It is that of a model in bfloat16 with quantized weights. Beside it is the error of the same quantized weights,
stored as bfloat16, with activations in bfloat16. The goal is a ratio of at most 1.3.

Exit code 1: a ratio is above the goal.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.accuracy import RANDOM_PROMPTS, engine_args_for, logits_of
from benchmarks.quality.formats import FORMATS
from benchmarks.shared.observed_engine import ObservedEngine
from benchmarks.shared.report import emit, print_table
from inflight.kernels.quantized_weight import quantize_rows

GOAL = 1.3
MODEL: dict[str, Any] = {  # Any: values of config.json
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
BITS = {"int8": 8, "int4": 4}  # of the linear layers; the head has 8
GROUP_SIZE = 64


def planted_model(num_channels: int, factor: float, seed: int) -> Any:  # Any: a model of transformers
    """A random model in bfloat16, with `num_channels` of each norm's weight multiplied by `factor`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**MODEL), dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            weight.data[torch.randperm(len(weight), device="cpu")[:num_channels]] *= factor
    return model


def quantize_weights(model: nn.Module, bits: int) -> None:
    """Gives each linear layer the values that it has with weights of `bits` bits."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            quantized = quantize_rows(weight, bits=8 if name == "lm_head" else bits, group_size=GROUP_SIZE)
            module.weight.data = quantized.dequantize().to(weight.dtype)


def log_probs_of(folder: Path, prompts: list[list[int]], engine_args: dict[str, Any]) -> Tensor:
    """float64 [tokens of all prompts, vocab_size], by Inflight's engine."""
    with ObservedEngine(engine_args_for(folder, prompts, engine_args)) as engine:
        return logits_of(engine, prompts).double().log_softmax(-1)


def squared_errors(
    num_channels: int, factor: float, seed: int, formats: list[str]
) -> Iterator[tuple[str, float, float]]:
    """For each format: its name, and the mean squared errors with quantized and with plain activations."""
    prompts = [[token % MODEL["vocab_size"] for token in prompt] for prompt in RANDOM_PROMPTS.prompts()]
    with tempfile.TemporaryDirectory() as name:
        plain, rounded = Path(name) / "plain", Path(name) / "rounded"
        planted_model(num_channels, factor, seed).save_pretrained(plain)
        model = planted_model(num_channels, factor, seed).double()
        with torch.inference_mode():
            truth = torch.cat([model(torch.tensor([prompt], device="cpu")).logits[0] for prompt in prompts])
        truth = truth.log_softmax(-1)
        for format_name in formats:
            model = planted_model(num_channels, factor, seed)
            quantize_weights(model, BITS[format_name])
            model.save_pretrained(rounded)
            arguments = FORMATS[format_name].engine_args
            found = log_probs_of(plain, prompts, arguments), log_probs_of(rounded, prompts, {})
            quantized, baseline = (float((each - truth).square().mean()) for each in found)
            yield format_name, quantized, baseline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=[*BITS], default=[*BITS], help="[all]")
    parser.add_argument("--channels", nargs="+", type=int, default=[1, 2, 4, 8], help="[1 2 4 8]")
    parser.add_argument("--factors", nargs="+", type=float, default=[10, 100, 1000], help="[10 100 1000]")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind [%(default)s]")
    args = parser.parse_args()
    rows: list[list[str]] = []
    is_met = True
    for num_channels in args.channels:
        for factor in args.factors:
            totals = {name: [0.0, 0.0] for name in args.formats}
            for seed in range(args.seeds):
                for name, *errors in squared_errors(num_channels, factor, seed, args.formats):
                    totals[name] = [total + each for total, each in zip(totals[name], errors, strict=True)]
            row = [f"{num_channels} x {factor:g}"]
            for name, sums in totals.items():
                quantized, baseline = (math.sqrt(total / args.seeds) for total in sums)
                is_met = is_met and quantized <= GOAL * baseline
                emit(
                    benchmark="planted_channels",
                    channels=num_channels,
                    factor=factor,
                    format=name,
                    error=quantized,
                    error_of_plain_activations=baseline,
                )
                row += [f"{quantized:.4f}", f"{baseline:.4f}", f"{quantized / baseline:.2f}"]
            rows.append(row)
    columns = [title for name in args.formats for title in (name, f"{name}, plain activations", "ratio")]
    print_table(["channels x factor", *columns], rows)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
