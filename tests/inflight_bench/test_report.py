"""Figures out of records that are written down here, and the pieces that need no server."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight_bench.dataset import BenchRequest, custom_requests, draw_lengths, random_requests, sharegpt_requests
from inflight_bench.load import Load, arrival_times, generate_load
from inflight_bench.options import DatasetOptions, ResultOptions, TrafficOptions
from inflight_bench.record import RequestRecord
from inflight_bench.report import figures


def record(sent: float, ttft: float, gap: float, num_tokens: int, error: str = "") -> RequestRecord:
    times = [sent + ttft + gap * index for index in range(num_tokens)]
    return RequestRecord(
        sent=sent, num_prompt_tokens=10, num_output_tokens=num_tokens, token_times=times, ended=times[-1], error=error
    )


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_figures() -> None:
    records = [record(index, 0.1 * (index + 1), 0.02, 11) for index in range(4)]
    records += [record(0.5, 0.1, 0.0, 1), record(0, 5, 5, 5, error="lost")]
    settings = ResultOptions(metric_percentiles="50,99.5", goodput=["ttft:250 tpot:20.001", "e2el:1000"])
    result = figures(Load(records=records, seconds=5.0, cpu_seconds=1.0), settings)
    assert (result["completed"], result["failed"]) == (5, 1)
    assert result["total_input_tokens"] == 50
    assert result["total_output_tokens"] == 45
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 9.0
    assert result["total_token_throughput"] == 19.0
    assert result["request_goodput"] == pytest.approx(3 / 5)  # TTFT of 100, 200 and 100 ms
    assert result["median_ttft_ms"] == pytest.approx(200)
    assert result["mean_ttft_ms"] == pytest.approx(220)
    assert result["p99.5_ttft_ms"] == pytest.approx(np.percentile([100, 200, 300, 400, 100], 99.5))
    assert result["mean_itl_ms"] == pytest.approx(20)
    assert result["std_tpot_ms"] == pytest.approx(0, abs=1e-9)
    assert result["max_concurrent_requests"] == 1
    assert result["max_output_tokens_per_s"] == 12
    assert result["client_cpu_share"] == 0.2
    assert "mean_client_queue_time_ms" not in result


def test_a_request_waits_from_its_time_until_it_is_sent() -> None:
    """The client sends one at a time, and each is answered after 1000 s of a clock that jumps."""

    class Client:
        def request_body(self, model: str, request: BenchRequest) -> dict[str, str]:
            return {"model": model}

        async def send(self, data: bytes, num_prompt_tokens: int) -> RequestRecord:
            assert (json.loads(data), num_prompt_tokens) == ({"model": "m"}, 2)
            now = time.perf_counter()
            await asyncio.sleep(0)
            return RequestRecord(sent=now, num_prompt_tokens=num_prompt_tokens, ended=now + 1000.0)

    client: Any = Client()
    requests = [BenchRequest(prompt=[1, 2], max_tokens=3, num_prompt_tokens=2)] * 3
    ends: list[bool] = []
    load = asyncio.run(
        generate_load(client, "m", requests, [0.0] * 3, max_concurrency=1, on_end=lambda: ends.append(True))
    )
    assert len(ends) == len(load.records) == 3
    assert all(0 <= each.queue_time < 500 and 0 <= each.lag < 500 for each in load.records)
    assert load.seconds >= 1000.0


def test_an_end_makes_room_for_a_start() -> None:
    records = [record(0.0, 1.0, 0, 1), record(1.0, 1.0, 0, 1), record(1.5, 1.0, 0, 1)]
    assert figures(Load(records=records, seconds=3, cpu_seconds=0), ResultOptions())["max_concurrent_requests"] == 2


def test_tokens_of_a_piece_share_it() -> None:
    """Three tokens in one piece are one latency to the reader, but tokens per output token all the same."""
    one = RequestRecord(sent=0.0, num_output_tokens=3, token_times=[0.5], ended=1.5)
    assert one.itls == []
    assert one.tpot == 0.5


def test_arrivals_are_poisson_at_their_rate() -> None:
    times = arrival_times(TrafficOptions(request_rate=20), 4000, rng())
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(200)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.05)
    assert list(times) == sorted(times)


def test_burstiness_is_a_positive_number() -> None:
    for burstiness in (-1.0, 0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="must be positive and finite"):
            TrafficOptions(burstiness=burstiness)


def test_burstiness_sets_the_spread_of_the_gaps() -> None:
    for burstiness in (0.25, 4.0, 100.0):
        gaps = np.diff(arrival_times(TrafficOptions(request_rate=5, burstiness=burstiness), 4000, rng()))
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(TrafficOptions(), 3, rng()) == [0.0, 0.0, 0.0]


def test_nothing_arrives_while_it_is_off() -> None:
    times = np.array(arrival_times(TrafficOptions(request_rate=50, burst_on=2.0, burst_off=3.0), 500, rng()))
    assert np.all(times % 5.0 <= 2.0 + 1e-9)
    assert times[-1] == pytest.approx(10 + 5 * 3)


@pytest.mark.parametrize("ramp_up", ["linear", "exponential"])
def test_a_ramp_goes_up(ramp_up: str) -> None:
    traffic = TrafficOptions(ramp_up_strategy=ramp_up, ramp_up_start_rps=1, ramp_up_end_rps=100, burstiness=1e6)
    gaps = np.diff(arrival_times(traffic, 1000, rng()), prepend=0.0)
    assert gaps[0] == pytest.approx(1, rel=0.02)
    assert gaps[-1] == pytest.approx(0.01, rel=0.02)
    middle = 50.5 if ramp_up == "linear" else 10.0
    assert gaps[500] == pytest.approx(1 / middle, rel=0.03)


def test_lengths() -> None:
    assert set(draw_lengths(7, DatasetOptions(), 50, rng())) == {7}
    uniform = draw_lengths(100, DatasetOptions(range_ratio=0.2), 5000, rng())
    assert (min(uniform), max(uniform)) == (80, 120)
    lognormal = draw_lengths(100, DatasetOptions(lognormal_sigma=0.5), 5000, rng())
    assert np.mean(lognormal) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(lognormal)) == pytest.approx(0.5, rel=0.05)
    assert min(draw_lengths(1, DatasetOptions(lognormal_sigma=2), 1000, rng())) == 1


def test_prefixes_are_shared() -> None:
    options = DatasetOptions(input_len=5, output_len=5, prefix_len=8, num_prefixes=3)
    requests = random_requests(60, range(10, 999), options, rng())
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {13}
    assert len({tuple(map(str, prompt[:8])) for prompt in prompts}) == 3
    assert len({tuple(map(str, prompt)) for prompt in prompts}) == 60
    assert all(request.num_prompt_tokens == 13 for request in requests)


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(
        '[{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "!"}]}, {"conversations": []}]'
    )
    assert [(each.prompt, each.max_tokens) for each in sharegpt_requests(path, 2, 9)] == [("Hi", 9), ("Hi", 9)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1, is not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2, has neither"),
        ('{"prompt": [true]}', "neither"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens=0"),
        ("[]", "neither"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        custom_requests(path, 1, 1)
