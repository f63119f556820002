"""The first token of a prompt whose blocks are in the host pool, in files, or in Redis, against computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.kv_tiers.bandwidth import copy_speed, drop_page_cache
from benchmarks.kv_tiers.redis_server import RedisServer, why_no_redis
from benchmarks.kv_tiers.setting import (
    BLOCK_SIZE,
    Row,
    Setting,
    Tier,
    drain,
    first_token,
    forget_arena,
    forget_near,
    generate,
    tell,
)
from inflight.entrypoints.llm_engine import LLMEngine

SIZE = 4  # arenas and host pools of an engine with a host pool have room for so many prompts
BARS = {"host pool": 0.05, "fs": 0.10, "redis": 0.15, "fs, restarted": 0.15}


@dataclass
class _Ratios:
    """Of one place: first token from it / computed, and the share of the prompt that was found."""

    ratios: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def row(self, setting: Setting, place: str) -> Row:
        found = f"{min(self.shares):.0%} of the blocks found"
        return Row(
            f"first token of {setting.prompt_len} tokens, {place} / computed", self.ratios, BARS[place], note=found
        )

    def add(self, setting: Setting, place: str, plain: LLMEngine, other: LLMEngine, prompt: Sequence[int]) -> None:
        """Time both ways; the order changes from round to round."""
        index = len(self.ratios)
        results = {}
        for engine in (plain, other) if index % 2 else (other, plain):
            results[engine is other] = first_token(engine, prompt)
        forget_arena(plain)
        drain(other)
        (computed, truth), (loaded, output) = results[False], results[True]
        setting.compare(truth, output)
        self.ratios.append(loaded / computed)
        self.shares.append(output.num_cached_tokens / ((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE))
        tell("first token", place=place, round=index, computed_s=computed, loaded_s=loaded, share=self.shares[-1])


def rows(setting: Setting) -> list[Row]:
    length = setting.prompt_len
    with setting.engine(length + 16, max_model_len=length + 1) as plain:
        found = _host_pool(setting, plain)
        found += _fs(setting, plain)
        if reason := why_no_redis():
            return [*found, Row(f"first token of {length} tokens, redis / computed", bar=BARS["redis"], note=reason)]
        with RedisServer() as server:
            tier = {"type": "redis", "url": server.url, "timeout_seconds": 10}
            return found + _from_tier(setting, plain, "redis", tier, server.forget_all)[0]


def _host_pool(setting: Setting, plain: LLMEngine) -> list[Row]:
    found, speeds = _Ratios(), []
    tokens = SIZE * setting.prompt_len
    with setting.engine(tokens, tokens, max_model_len=setting.prompt_len + 1) as engine:
        for _ in range(setting.rounds):
            prompt = setting.draw(setting.prompt_len)
            generate(engine, [prompt], 1)
            drain(engine)
            forget_arena(engine)
            found.add(setting, "host pool", plain, engine, prompt)
        arrays = [np.ones((setting.prompt_len // BLOCK_SIZE, setting.block_bytes), np.uint8) for _ in range(2)]
        for _ in range(setting.rounds):
            forget_arena(engine)
            first_token(engine, prompt)
            counts = drain(engine)
            speed, bare = counts.load_bytes / counts.load_seconds, copy_speed(*arrays)
            tell("host pool to arena in the engine", bytes_per_s=speed, memcpy_bytes_per_s=bare)
            speeds.append(speed / bare)
        blocks = _blocks_loaded(setting, engine)
    return [
        found.row(setting, "host pool"),
        Row("bandwidth in the engine, host pool to arena / memcpy", speeds, 0.7, False),
        blocks,
    ]


def _blocks_loaded(setting: Setting, engine: LLMEngine) -> Row:
    """Of a prompt of 775 tokens with 704 in the arena, the host pool has to bring 4 blocks: 64 tokens."""
    total, local = (775, 704) if setting.prompt_len >= 775 else (327, 256)
    prompt = setting.draw(total)
    generate(engine, [prompt], 1)
    drain(engine)
    forget_arena(engine)
    generate(engine, [prompt[: local + 1]], 1)  # brings 704 tokens, and computes one
    drain(engine)
    _, (output,) = generate(engine, [prompt], 1)
    counts = drain(engine)
    num_blocks = counts.load_bytes / setting.block_bytes
    tell("blocks loaded", tokens=total, local=local, bytes=counts.load_bytes, cached=output.num_cached_tokens)
    return Row(f"blocks loaded for {total} tokens, {local} of them in the arena (bytes / a block's)", [num_blocks], 4)


def _fs(setting: Setting, plain: LLMEngine) -> list[Row]:
    folder = setting.folder / "first"
    tier = {"type": "fs", "path": str(folder), "timeout_seconds": 10}
    found, prompts = _from_tier(setting, plain, "fs", tier, lambda: drop_page_cache(folder))
    restarted, tokens = _Ratios(), SIZE * setting.prompt_len
    for prompt in prompts:
        with setting.engine(tokens, tokens, [tier], max_model_len=setting.prompt_len + 1) as engine:
            drop_page_cache(Path(folder))
            restarted.add(setting, "fs, restarted", plain, engine, prompt)
    return [*found, restarted.row(setting, "fs, restarted")]


def _from_tier(
    setting: Setting, plain: LLMEngine, place: str, tier: Tier, prepare: Callable[[], None]
) -> tuple[list[Row], list[list[int]]]:
    """`prepare`: for redis it empties the server before a prompt is computed. For fs it drops the files from the page cache
    before the first token is timed."""
    found, tokens, prompts = _Ratios(), SIZE * setting.prompt_len, []
    with setting.engine(tokens, tokens, [tier], max_model_len=setting.prompt_len + 1) as engine:
        for _ in range(setting.rounds):
            prompts.append(setting.draw(setting.prompt_len))
            if place == "redis":
                prepare()
            generate(engine, [prompts[-1]], 1)
            drain(engine)
            forget_near(engine)
            if place == "fs":
                prepare()
            found.add(setting, place, plain, engine, prompts[-1])
    return [found.row(setting, place)], prompts
