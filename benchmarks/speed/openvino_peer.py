"""A program for another environment, which has openvino, nncf, torch and transformers, and not Inflight: embeddings in int8.

    /path/to/python -m benchmarks.openvino_peer FOLDER [--calibration 32]

FOLDER is a BERT of `benchmarks.embeddings`. Its int8 model (weights and activations, by nncf's quantization after training) is
kept in FOLDER/openvino. Each line of stdin is a list of texts, each a list of token ids; the answer is a line with the vectors
(MEAN, normalized) of the first texts and the seconds that all of them took: sorted by length, in padded batches of 32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import nncf
import numpy as np
import openvino
import torch
from transformers import AutoModel

BATCH_SIZE, NUM_RETURNED = 32, 200
MOST_TOKENS, FIRST_TOKEN = 256, 1000  # of the texts for the calibration


def padded(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """ids and mask, [number of texts, longest]."""
    ids = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ids, mask


class WithWideMask(torch.nn.Module):
    """The model with a mask [number of texts, 1, 1, longest]. The code of transformers that makes one cannot be traced."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        wide = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=wide).last_hidden_state
        return hidden


def quantized(folder: Path, count: int) -> openvino.Model:
    """The int8 model, made if it is not there. `count`: the number of texts for the calibration."""
    stored = folder / "openvino" / "int8.xml"
    core = openvino.Core()
    if not stored.is_file():
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        ids, mask = (torch.from_numpy(each) for each in padded([[FIRST_TOKEN] * 8, [FIRST_TOKEN] * 5]))
        with torch.no_grad():
            converted = openvino.convert_model(
                WithWideMask(model), example_input={"input_ids": ids, "attention_mask": mask}
            )
        rng = random.Random(1)
        vocabulary = model.config.vocab_size
        texts = [
            [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(rng.randint(4, MOST_TOKENS))] for _ in range(count)
        ]

        def inputs(text: list[int]) -> dict[str, np.ndarray]:
            ids, mask = padded([text])
            return {"input_ids": ids, "attention_mask": mask}

        made = nncf.quantize(converted, nncf.Dataset(texts, inputs), model_type=nncf.ModelType.TRANSFORMER)
        stored.parent.mkdir(exist_ok=True)
        openvino.save_model(made, stored)
    return core.read_model(stored)


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings by OpenVINO in int8.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calibration", type=int, default=32, help="[%(default)s]")
    args = parser.parse_args()
    compiled = openvino.compile_model(quantized(args.folder, args.calibration), "CPU")

    def vectors(texts: list[list[int]]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[np.ndarray] = [np.empty(0)] * len(texts)
        for first in range(0, len(order), BATCH_SIZE):
            batch = order[first : first + BATCH_SIZE]
            ids, mask = padded([texts[index] for index in batch])
            hidden = compiled({"input_ids": ids, "attention_mask": mask})[0]
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            for index, vector in zip(batch, mean / np.linalg.norm(mean, axis=1, keepdims=True), strict=True):
                found[index] = vector
        return np.stack(found)

    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        begin = time.perf_counter()
        made = vectors(texts)
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "vectors": made[:NUM_RETURNED].tolist()}), flush=True)


if __name__ == "__main__":
    main()
