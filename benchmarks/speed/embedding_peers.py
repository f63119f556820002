"""Embeddings by Inflight in int8, against OpenVINO in int8, which runs in an environment of its own, in turns.

    python3 -m venv /tmp/other && /tmp/other/bin/pip install openvino nncf torch transformers
    python -m benchmarks.embedding_peers --python /tmp/other/bin/python [--shapes minilm,bge-base] [--texts 2000] [--rounds 3]

The models and the texts are those of `benchmarks.embeddings`. The other side sorts texts by length, and computes them in padded
batches of 32. Speeds are tokens per second; the ratio of `one text` is of speeds, too. The cosines are the smallest with
transformers' vectors in float32, of the other side and of Inflight. With random weights both are lower than with real ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER
from benchmarks.shared.report import allow_slow_steps, emit, print_table
from benchmarks.speed.embeddings import ONE_TEXT, SHAPES, draw_texts, model_folder, our_vectors, padded_vectors
from inflight import LLM

PROGRAM = "benchmarks.speed.openvino_peer"
ROOT = Path(__file__).parents[2]
GOAL, GOAL_OF_ONE = 1.3, 1.0
NUM_COMPARED, ONE_REPEATS = 200, 50


class Peer:
    """The other process. It ends with the `with` block."""

    def __init__(self, python: Path, folder: Path) -> None:
        command = [str(python), "-m", PROGRAM, str(folder.absolute())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    def __enter__(self) -> Peer:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the libraries print, too
            if line.strip() == "ready":
                return self
        raise SystemExit(f"the other side did not start: exit code {self._process.wait()}")

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def embed(self, texts: list[list[int]]) -> tuple[float, np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """The seconds, and the vectors of the first texts."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["seconds"], np.array(answer["vectors"])


def measure(shape: str, texts: list[list[int]], rounds: int, python: Path, models_folder: Path) -> list[list[str]]:
    folder = model_folder(shape, models_folder)
    compared = texts[:NUM_COMPARED]
    exact = padded_vectors(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), compared)
    options = {"skip_tokenizer_init": True, "pooler_config": {"pooling_type": "MEAN"}}
    with Peer(python, folder) as peer, LLM(str(folder), dtype="bfloat16", quantization="int8", **options) as llm:
        found = {"other": peer.embed(compared)[1], "ours": our_vectors(llm, compared)}
        cosines = {side: float((vectors * exact).sum(axis=1).min()) for side, vectors in found.items()}
        emit(benchmark="embedding_peers", shape=shape, **{side: round(value, 6) for side, value in cosines.items()})

        def theirs(given: list[list[int]], repeats: int) -> Callable[[], float]:
            return lambda: repeats * sum(map(len, given)) / sum(peer.embed(given)[0] for _ in range(repeats))

        def own(given: list[list[int]], repeats: int) -> Callable[[], float]:
            def timed() -> float:
                begin = time.perf_counter()
                for _ in range(repeats):
                    our_vectors(llm, given)
                return repeats * sum(map(len, given)) / (time.perf_counter() - begin)

            return timed

        one = [next(text for text in texts if len(text) >= ONE_TEXT)[:ONE_TEXT]]
        rows = [
            [*compare_in_turns("embedding_peers", case, theirs(given, times), own(given, times), rounds), str(goal)]
            for case, given, times, goal in (
                (shape, texts, 1, GOAL),
                (f"{shape}, one text", one, ONE_REPEATS, GOAL_OF_ONE),
            )
        ]
    return [[*row, f"{cosines['other']:.5f}", f"{cosines['ours']:.5f}"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings in int8, against OpenVINO in int8.")
    parser.add_argument(
        "--python", type=Path, required=True, help="the Python of an environment with openvino and nncf"
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="[%(default)s]")
    parser.add_argument("--texts", type=int, default=2000, help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where models are kept [%(default)s]"
    )
    args = parser.parse_args()
    allow_slow_steps()
    texts = draw_texts(args.texts)
    rows = [
        row for shape in args.shapes.split(",") for row in measure(shape, texts, args.rounds, args.python, args.models)
    ]
    print_table(["case", "OpenVINO", "inflight", "ratio", "goal", "cosine, OpenVINO", "cosine, inflight"], rows)


if __name__ == "__main__":
    main()
