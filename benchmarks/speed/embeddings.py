"""Embeddings of texts of many lengths: Inflight, without padding, against batches of one length, in turns.

    python -m benchmarks.embeddings [--shapes minilm,bge-base] [--formats float32,bfloat16,int8] [--texts 2000] [--rounds 3]

The other side does what sentence-transformers does by default, with transformers' model: texts sorted by length, in batches of
32 that are padded to their longest, MEAN of the tokens that are no padding, normalized. Both get token ids of 4 to 256 tokens,
and have all cores. Speeds are tokens per second. Inflight's int8 stands against the other side's bfloat16. The smallest cosine
is that of our vectors with those of transformers in float32. `one text`: the time of one text of 16 tokens; the ratio is of
speeds.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, BertConfig, PreTrainedModel

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER
from benchmarks.shared.report import allow_slow_steps, emit, print_table
from inflight import LLM

SHAPES = {
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
VOCAB_SIZE, MAX_LEN, BATCH_SIZE = 30522, 512, 32
LENGTHS = (4, 256)
ONE_TEXT, ONE_REPEATS = 16, 50
GOAL, MIN_COSINE = 1.5, 0.999

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def model_folder(shape: str, models_folder: Path) -> Path:
    """The folder of a BERT of this shape with random weights, made if it is not there."""
    folder = models_folder / f"bert-{shape}"
    if not (folder / "config.json").is_file():
        config = BertConfig(**SHAPES[shape], vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN)
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(folder)
    return folder


def draw_texts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, VOCAB_SIZE) for _ in range(rng.randint(*LENGTHS))] for _ in range(count)]


@torch.inference_mode()
def padded_vectors(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Vectors:
    found = np.zeros((len(texts), model.config.hidden_size))
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for first in range(0, len(order), BATCH_SIZE):
        batch = order[first : first + BATCH_SIZE]
        ids = torch.zeros(len(batch), len(texts[batch[0]]), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, : len(texts[index])] = torch.tensor(texts[index])
            mask[row, : len(texts[index])] = 1
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        vectors = (hidden * weights).sum(1) / weights.sum(1)
        found[batch] = torch.nn.functional.normalize(vectors, dim=-1).double().numpy()
    return found


def our_vectors(llm: LLM, texts: Sequence[list[int]]) -> Vectors:
    return np.array([each.outputs.embedding for each in llm.embed(list(texts), use_tqdm=False)])


def measure(shape: str, weights: str, texts: list[list[int]], rounds: int, models_folder: Path) -> list[list[str]]:
    folder = model_folder(shape, models_folder)
    dtype = "bfloat16" if weights == "int8" else weights
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    exact = padded_vectors(reference, texts[:200])
    peer = reference if dtype == "float32" else AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with LLM(
        str(folder),
        dtype=dtype,
        quantization="int8" if weights == "int8" else None,
        skip_tokenizer_init=True,
        pooler_config={"pooling_type": "MEAN"},
    ) as llm:
        ours = our_vectors(llm, texts[:200])
        cosine = float((ours * exact).sum(axis=1).min())
        emit(benchmark="embeddings", shape=shape, weights=weights, smallest_cosine=round(cosine, 6))
        num_tokens = sum(map(len, texts))
        one = [text[:ONE_TEXT] for text in texts if len(text) >= ONE_TEXT][:1]

        def speed(
            run: Callable[[list[list[int]]], object], given: list[list[int]], repeats: int
        ) -> Callable[[], float]:
            def timed() -> float:
                begin = time.perf_counter()
                for _ in range(repeats):
                    run(given)
                return repeats * sum(map(len, given)) / (time.perf_counter() - begin)

            return timed

        def peers(given: list[list[int]]) -> Vectors:
            return padded_vectors(peer, given)

        def own(given: list[list[int]]) -> Vectors:
            return our_vectors(llm, given)

        name = f"{shape} {weights}"
        rows = [
            compare_in_turns("embeddings", name, speed(peers, texts, 1), speed(own, texts, 1), rounds),
            compare_in_turns(
                "embeddings", f"{name}, one text", speed(peers, one, ONE_REPEATS), speed(own, one, ONE_REPEATS), rounds
            ),
        ]
        return [[*row, f"{cosine:.5f}", str(num_tokens)] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings without padding, against padded batches.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="[%(default)s]")
    parser.add_argument("--formats", default="float32,bfloat16,int8", help="[%(default)s]")
    parser.add_argument("--texts", type=int, default=2000, help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where models are kept [%(default)s]"
    )
    args = parser.parse_args()
    allow_slow_steps()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    texts = draw_texts(args.texts)
    rows = [
        row
        for shape in args.shapes.split(",")
        for weights in args.formats.split(",")
        for row in measure(shape, weights, texts, args.rounds, args.models)
    ]
    print_table(["case", "padded", "inflight", f"ratio (goal {GOAL})", f"cosine (goal {MIN_COSINE})", "tokens"], rows)


if __name__ == "__main__":
    main()
