"""Images beside streams: the gaps between tokens, the second turn, and many clients with one image.

    python -m benchmarks.images [gaps] [turns] [clients] [--shapes qwen3-vl,smolvlm] [--rounds 3] [--seconds 12]

- gaps: the 99th percentile of the gaps between the tokens of 8 streams while an image of 1,024 x 1,024 pixels comes every two
  seconds, against the streams alone. Goal: at most 1.5.
- turns: the time to the first token of a chat with an image, and of its second turn. Goal: at most 0.3.
- clients: 16 clients send one image at the same time: how often it is encoded, and all answers are equal.

The engine gets pixels as a processor makes them; processors are not measured here. Towers have published sizes and random
weights, and so has the decoder (that of Qwen3-0.6B, or of SmolVLM-256M).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedConfig, Qwen3VLConfig, SmolVLMConfig

from benchmarks.compare.table import Spread
from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table, verdict
from inflight import AsyncLLM, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.config.vision import Grid, VisionSpec
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.start.model_files import resolve_config
from inflight.interface.images import ImageInput, ImagesPart

NUM_STREAMS, EVERY_SECONDS, NUM_CLIENTS = 8, 2.0, 16
PROMPT_TOKENS, ANSWER_TOKENS = 64, 24
VOCAB_SIZE = 1000
GAP_GOAL, TURN_GOAL = 1.5, 0.3


class Shape(NamedTuple):
    config: PreTrainedConfig
    grids: list[Grid]  # of an image of 1,024 x 1,024 pixels: one for each of its tiles


def shape_of(name: str) -> Shape:
    if (
        name == "smolvlm"
    ):  # 16 tiles of 512 x 512 pixels, for its longest edge becomes 2,048, and the whole image as one more
        tower = {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16}
        text = {
            **_text("llama"), "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3,
        }  # fmt: skip
        small = SmolVLMConfig(vision_config=tower, text_config=text, scale_factor=4, image_token_id=VOCAB_SIZE - 1)
        return Shape(small, [(1, 32, 32)] * 17)
    tower = {"hidden_size": 1024, "num_heads": 16, "depth": 24, "intermediate_size": 4096, "out_hidden_size": 1024}
    features = {"deepstack_visual_indexes": [5, 11, 17]}
    text = {
        **_text("qwen3_vl_text"), "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    config = Qwen3VLConfig(vision_config={**tower, **features}, text_config=text, image_token_id=VOCAB_SIZE - 1)
    return Shape(config, [(1, 64, 64)])


def _text(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192, "pad_token_id": 0}


class Bench:
    def __init__(self, engine: AsyncLLM, grids: Sequence[Grid]) -> None:
        self.engine, self.grids = engine, grids
        self._numbers = itertools.count()

    def prompt(self, vision: VisionSpec, seed: int, behind: int) -> tuple[dict[str, Any], ImagesPart]:
        """A prompt with an image, and `behind` tokens of text behind it."""
        tokens = [1] * 16
        images = []
        rng = np.random.default_rng(seed)
        for grid in self.grids:
            count = grid[0] * grid[1] * grid[2]
            shape = (count, vision.patch_features) if vision.has_position_rows else (3, grid[1] * 16, grid[2] * 16)
            pixels = rng.standard_normal(shape, dtype=np.float32)
            digest = hashlib.sha256(pixels.tobytes()).digest()
            num_tokens = vision.num_tokens(grid)
            images.append(ImageInput(start=len(tokens), num_tokens=num_tokens, digest=digest, pixels=pixels, grid=grid))
            tokens += [vision.image_token_id] * num_tokens + [2]
        part = ImagesPart(images=tuple(images), position_merge=vision.position_merge)
        return {"prompt_token_ids": tokens + [3] * behind}, part

    async def run(self, prompt: Any, part: ImagesPart | None, max_tokens: int) -> tuple[list[float], list[int]]:
        """When each token came, and the tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        times, tokens = [], []
        options: dict[str, Any] = {} if part is None else {"parts": (part,)}
        outputs = self.engine.generate(
            prompt, params, request_id=f"r{next(self._numbers)}", kind=RequestOutputKind.DELTA, **options
        )
        async for output in outputs:
            for token in output.outputs[0].token_ids:
                times.append(time.perf_counter())
                tokens.append(token)
        return times, tokens


@asynccontextmanager
async def served(name: str) -> AsyncIterator[tuple[Bench, VisionSpec]]:
    shape = shape_of(name)
    with tempfile.TemporaryDirectory() as folder:
        shape.config.architectures = [f"{type(shape.config).__name__.removesuffix('Config')}ForConditionalGeneration"]
        Path(folder, "config.json").write_text(json.dumps(shape.config.to_dict()), encoding="utf-8")
        args = EngineArgs(
            model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=NUM_CLIENTS + NUM_STREAMS, kv_cache_memory_bytes=2 << 30,
        )  # fmt: skip
        async with await AsyncLLM.from_args(args) as engine:
            vision = resolve_config(args).model.architecture.vision
            assert vision is not None
            yield Bench(engine, shape.grids), vision


async def gaps(bench: Bench, vision: VisionSpec, rounds: int, seconds: float) -> list[str]:
    async def streams(*, beside: bool) -> float:
        stop = asyncio.Event()

        async def images() -> None:
            for seed in itertools.count(1000 * next(bench._numbers)):
                prompt, part = await asyncio.to_thread(bench.prompt, vision, seed, 8)
                begin = time.perf_counter()
                asking = asyncio.ensure_future(bench.run(prompt, part, 4))
                try:
                    async with asyncio.timeout(EVERY_SECONDS):
                        await stop.wait()
                except TimeoutError:
                    await asking
                    emit(benchmark="images", case="image beside streams", seconds=time.perf_counter() - begin)
                    continue
                await asking
                return

        async def stream() -> list[float]:
            found: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                times, _ = await bench.run({"prompt_token_ids": [5] * PROMPT_TOKENS}, None, 200)
                found += [later - earlier for earlier, later in itertools.pairwise(times)]
            return found

        other = asyncio.ensure_future(images()) if beside else None
        found = await asyncio.gather(*(stream() for _ in range(NUM_STREAMS)))
        stop.set()
        if other is not None:
            await other
        values = [gap for each in found for gap in each]
        emit(
            benchmark="images",
            beside=beside,
            p50=percentile(values, 0.5),
            p99=percentile(values, 0.99),
            most=max(values),
        )
        return percentile(values, 0.99)

    await streams(beside=True)  # the engine learns how long a layer of the tower takes
    ratios = []
    for index in range(rounds):
        both = {}
        for beside in (False, True) if index % 2 else (True, False):
            both[beside] = await streams(beside=beside)
        ratios.append(both[True] / both[False])
    ratio = Spread.of(ratios)
    return ["p99 gap beside images / alone", str(ratio), f"{GAP_GOAL}", verdict(ratio.median <= GAP_GOAL)]


async def turns(bench: Bench, vision: VisionSpec, rounds: int, seconds: float) -> list[str]:
    ratios = []
    for index in range(rounds + 1):
        prompt, part = bench.prompt(vision, 77 + index, 8)
        begin = time.perf_counter()
        times, tokens = await bench.run(prompt, part, ANSWER_TOKENS)
        first = times[0] - begin
        longer = {"prompt_token_ids": [*prompt["prompt_token_ids"], *tokens, *[4] * 16]}
        begin = time.perf_counter()
        times, _ = await bench.run(longer, part, ANSWER_TOKENS)
        second = times[0] - begin
        emit(benchmark="images", case="turns", first=first, second=second)
        if index:
            ratios.append(second / first)
    ratio = statistics.median(ratios)
    return ["first token of turn 2 / of turn 1", f"{ratio:.3f}", f"{TURN_GOAL}", verdict(ratio <= TURN_GOAL)]


async def clients(bench: Bench, vision: VisionSpec, rounds: int, seconds: float) -> list[str]:
    prompt, part = bench.prompt(vision, 7_000, 8)
    begin = time.perf_counter()
    alone, _ = await bench.run(prompt, part, ANSWER_TOKENS)
    alone_seconds = alone[0] - begin
    prompt, part = bench.prompt(vision, 7_001, 8)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(bench.run(prompt, part, ANSWER_TOKENS) for _ in range(NUM_CLIENTS)))
    last = max(times[0] for times, _ in answers) - begin
    is_equal = all(tokens == answers[0][1] for _, tokens in answers)
    emit(benchmark="images", case="clients", alone=alone_seconds, last_of_16=last, equal=is_equal)
    return [
        "last first token of 16 clients / of one",
        f"{last / alone_seconds:.2f}",
        "2",
        verdict(last <= 2 * alone_seconds),
    ]


PARTS = {"gaps": gaps, "turns": turns, "clients": clients}


async def run(parts: Sequence[str], shapes: Sequence[str], rounds: int, seconds: float) -> None:
    rows = []
    for name in shapes:
        async with served(name) as (bench, vision):
            for part in parts:
                rows.append([name, *await PARTS[part](bench, vision, rounds, seconds)])
    print_table(["shape", "case", "found", "goal", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Images beside streams.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument("--shapes", default="qwen3-vl,smolvlm", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement of gaps [%(default)s]")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    allow_slow_steps()
    asyncio.run(run(args.parts or list(PARTS), args.shapes.split(","), args.rounds, args.seconds))


if __name__ == "__main__":
    main()
