"""`run`: runs one benchmark: makes the requests, sends them to the server, and computes the figures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from inflight_bench.client import BenchClient
from inflight_bench.dataset import BenchRequest, custom_requests, random_requests, sharegpt_requests
from inflight_bench.load import Load, arrival_times, generate_load
from inflight_bench.options import CHAT, FIRST_TOKEN_ID, DatasetOptions, ResultOptions, ServerOptions, TrafficOptions
from inflight_bench.report import figures

MAX_CALLS = 16  # calls of /detokenize at the same time

# Random prompts are made from the tokens of this text. With any tokenizer, the ids of these tokens are valid and not special.
ALPHABET_TEXT = """The quick brown fox jumps over the lazy dog while seven wizards brew green potions; 0 1 2 3 4 5 6 7 8 9 tons.
It was a bright cold day in April, and people walked along the river to look for work, bread, water, light and music.
How many apples does a farmer sell if each box holds twelve? Write a function that returns the sum of two numbers: a + b.
"""


def run(
    server: ServerOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    body: Mapping[str, Any],  # Any: JSON
    result: ResultOptions,
) -> tuple[Load, dict[str, Any]]:  # Any: JSON
    """Returns the measured load, and its figures under vLLM's names. The fields of `body` are added to every request's JSON.

    Raises:
        ConfigError: the file of --dataset-path cannot be used.
        ConnectionError: no server answers, or one of the requests before the measurement has failed.
    """

    async def main() -> tuple[Load, dict[str, Any]]:
        rng = np.random.default_rng(dataset.seed)
        times = arrival_times(traffic, dataset.num_prompts, rng)
        async with BenchClient(server, body) as client:
            model = server.model or await _first_model(client)
            requests = await _requests(client, model, dataset, rng, as_text=server.endpoint == CHAT)
            load = await _measure(client, model, requests, dataset.num_warmups, times, traffic.max_concurrency)
        head = _head(model, server, dataset, traffic)
        return load, head | figures(load, result, max_concurrency=traffic.max_concurrency)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _measure(
    client: BenchClient,
    model: str,
    requests: list[BenchRequest],
    num_warmups: int,
    times: list[float],
    max_concurrency: int | None,
) -> Load:
    warmups, measured = requests[:num_warmups], requests[num_warmups:]
    if warmups:
        load = await generate_load(client, model, warmups, [0.0] * num_warmups, max_concurrency=max_concurrency)
        if errors := [record.error for record in load.records if record.error]:
            raise ConnectionError(f"{len(errors)} of {num_warmups} warm-up requests failed: {errors[0]}")
    with tqdm(total=len(measured), unit="request", disable=None) as progress:
        return await generate_load(
            client, model, measured, times, max_concurrency=max_concurrency, on_end=progress.update
        )


def _head(
    model: str, server: ServerOptions, dataset: DatasetOptions, traffic: TrafficOptions
) -> dict[str, Any]:  # Any: JSON
    """Returns the entries of the result that say what was measured, and when."""
    backend = "openai-chat" if server.endpoint == CHAT else "openai"
    head: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "model_id": model,
        "tokenizer_id": None,  # the server uses its own tokenizer
        "num_prompts": dataset.num_prompts,
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
    }
    more = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "burst_on", "burst_off")
    return head | {name: value for name in more if (value := getattr(traffic, name)) is not None}


async def _requests(
    client: BenchClient, model: str, dataset: DatasetOptions, rng: np.random.Generator, *, as_text: bool
) -> list[BenchRequest]:
    """Returns the warm-up requests, followed by the measured requests. If `as_text`, the server's /detokenize turns random
    token ids into texts."""
    count = dataset.num_warmups + dataset.num_prompts
    if dataset.dataset_path is not None:
        read = custom_requests if dataset.dataset_name == "custom" else sharegpt_requests
        return read(dataset.dataset_path, count, dataset.output_len)
    requests = random_requests(count, await _token_ids(client, model, dataset.max_token_id), dataset, rng)
    if not as_text:
        return requests
    slots = asyncio.Semaphore(MAX_CALLS)

    async def to_text(request: BenchRequest) -> BenchRequest:
        async with slots:
            answer = await client.call("/detokenize", {"model": model, "tokens": request.prompt})
        return replace(request, prompt=answer["prompt"], num_prompt_tokens=None)

    return await asyncio.gather(*map(to_text, requests))


async def _first_model(client: BenchClient) -> str:
    models = (await client.call("/v1/models")).get("data")
    if not models:
        raise ConnectionError("the server's /v1/models lists no model: give --model")
    return str(models[0]["id"])


async def _token_ids(client: BenchClient, model: str, max_token_id: int | None) -> list[int]:
    if max_token_id is not None:
        return list(range(FIRST_TOKEN_ID, max_token_id))
    try:
        answer = await client.call("/tokenize", {"model": model, "prompt": ALPHABET_TEXT, "add_special_tokens": False})
    except ConnectionError as error:
        raise ConnectionError(f"{error}; if the server has no path /tokenize, give --max-token-id") from error
    return sorted(set(answer["tokens"]))
