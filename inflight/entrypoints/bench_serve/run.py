"""`run`: one benchmark from the first question to the server to the figures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from inflight.entrypoints.bench_serve.arrivals import Arrivals
from inflight.entrypoints.bench_serve.client import CHAT, BenchClient
from inflight.entrypoints.bench_serve.dataset import (
    BenchRequest,
    Lengths,
    custom_requests,
    random_requests,
    sharegpt_requests,
)
from inflight.entrypoints.bench_serve.load import Load, generate_load
from inflight.entrypoints.bench_serve.report import ReportSettings, figures
from inflight.errors import ConfigError

FIRST_TOKEN_ID = 3  # the ids below are special tokens in most vocabularies
MAX_CALLS = 16  # to /detokenize at once

# Its tokens are the alphabet of random prompts: ids that are valid and ordinary under any tokenizer.
ALPHABET_TEXT = """The quick brown fox jumps over the lazy dog while seven wizards brew green potions; 0 1 2 3 4 5 6 7 8 9 tons.
It was a bright cold day in April, and people walked along the river to look for work, bread, water, light and music.
How many apples does a farmer sell if each box holds twelve? Write a function that returns the sum of two numbers: a + b.
"""

DATASETS = ("random", "custom", "sharegpt")


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """Of a file, `output_lengths.mean` is what a prompt asks for that does not say itself."""

    input_lengths: Lengths
    output_lengths: Lengths
    name: str = "random"
    path: Path | None = None
    prefix_len: int = 0
    num_prefixes: int = 1
    max_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(f"--dataset-name {self.name!r} must be one of {', '.join(DATASETS)}")
        if (self.name == "random") != (self.path is None):
            raise ConfigError(f"--dataset-path {'is needed by' if self.path is None else 'has no use for'} {self.name}")
        if self.max_token_id is not None and self.max_token_id <= FIRST_TOKEN_ID:
            raise ConfigError(f"--max-token-id {self.max_token_id} must be more than {FIRST_TOKEN_ID}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """`body`: fields that every request has; without `model` the server is asked for its first."""

    model: str | None
    dataset: DatasetSettings
    arrivals: Arrivals
    report: ReportSettings
    body: Mapping[str, Any]  # Any: JSON
    num_prompts: int = 100
    num_warmups: int = 0
    max_concurrency: int | None = None
    endpoint: str
    seed: int = 0


def run(
    base_url: str, settings: RunSettings, *, headers: Mapping[str, str], timeout: float
) -> tuple[Load, dict[str, Any]]:
    """The load as it was, and the result under vLLM's names.

    Raises:
        ConfigError: the settings do not go together.
        ConnectionError: no server answers, or it refuses what is asked before the start.
    """

    async def main() -> tuple[Load, dict[str, Any]]:
        body = dict(settings.body)
        async with BenchClient(
            base_url, endpoint=settings.endpoint, headers=headers, body=body, timeout=timeout
        ) as client:
            return await _run(client, settings)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _run(client: BenchClient, settings: RunSettings) -> tuple[Load, dict[str, Any]]:
    model = settings.model or await _first_model(client)
    rng = np.random.default_rng(settings.seed)
    times = settings.arrivals.times(settings.num_prompts, rng)
    requests = await _requests(client, model, settings, settings.num_prompts + settings.num_warmups, rng)
    warmups, measured = requests[: settings.num_warmups], requests[settings.num_warmups :]
    if warmups:
        load = await generate_load(
            client, model, warmups, [0.0] * len(warmups), max_concurrency=settings.max_concurrency
        )
        if errors := [record.error for record in load.records if record.error]:
            raise ConnectionError(f"{len(errors)} of {len(warmups)} warm-up requests failed: {errors[0]}")
    with tqdm(total=len(measured), unit="request", disable=None) as progress:
        load = await generate_load(
            client, model, measured, times, max_concurrency=settings.max_concurrency, on_end=progress.update
        )
    return load, _head(model, settings) | figures(load, settings.report, max_concurrency=settings.max_concurrency)


def _head(model: str, settings: RunSettings) -> dict[str, Any]:
    arrivals = settings.arrivals
    backend = "openai-chat" if settings.endpoint == CHAT else "openai"
    head: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "model_id": model,
        "tokenizer_id": None,  # the server's own
        "num_prompts": settings.num_prompts,
        "request_rate": "inf" if math.isinf(arrivals.request_rate) else arrivals.request_rate,
        "burstiness": arrivals.burstiness,
        "max_concurrency": settings.max_concurrency,
    }
    if arrivals.ramp_up is not None:
        head["ramp_up_strategy"] = arrivals.ramp_up
        head["ramp_up_start_rps"], head["ramp_up_end_rps"] = arrivals.ramp_up_start, arrivals.ramp_up_end
    if arrivals.burst_on is not None:
        head["burst_on"], head["burst_off"] = arrivals.burst_on, arrivals.burst_off
    return head


async def _requests(
    client: BenchClient, model: str, settings: RunSettings, count: int, rng: np.random.Generator
) -> list[BenchRequest]:
    dataset = settings.dataset
    max_tokens = dataset.output_lengths.mean
    if dataset.path is not None:
        read = custom_requests if dataset.name == "custom" else sharegpt_requests
        return read(dataset.path, count, max_tokens)
    requests = random_requests(
        count,
        await _token_ids(client, model, dataset.max_token_id),
        dataset.input_lengths,
        dataset.output_lengths,
        rng,
        prefix_len=dataset.prefix_len,
        num_prefixes=dataset.num_prefixes,
    )
    if settings.endpoint != CHAT:
        return requests
    slots = asyncio.Semaphore(MAX_CALLS)

    async def as_text(request: BenchRequest) -> BenchRequest:
        async with slots:
            answer = await client.call("/detokenize", {"model": model, "tokens": request.prompt})
        return replace(request, prompt=answer["prompt"], num_prompt_tokens=None)

    return await asyncio.gather(*map(as_text, requests))


async def _first_model(client: BenchClient) -> str:
    models = (await client.call("/v1/models")).get("data")
    if not models:
        raise ConnectionError("/v1/models names no model; give --model")
    return str(models[0]["id"])


async def _token_ids(client: BenchClient, model: str, max_token_id: int | None) -> list[int]:
    if max_token_id is not None:
        return list(range(FIRST_TOKEN_ID, max_token_id))
    try:
        answer = await client.call("/tokenize", {"model": model, "prompt": ALPHABET_TEXT, "add_special_tokens": False})
    except ConnectionError as error:
        raise ConnectionError(f"{error}; for a server without /tokenize give --max-token-id") from error
    return sorted(set(answer["tokens"]))
