"""`ServingMetrics`: what is scraped after a scripted series of calls, under every name, from one front end or several."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.interface.images import EncoderCounts
from inflight.interface.statistics import FAULT_CAUSES, FaultStatus, StepCounts, TransferCounts
from inflight.metrics.instruments import INSTRUMENTS, PREFIX
from inflight.metrics.serving import ServingMetrics
from inflight.multimodal.counts import ImageCounts
from inflight.sampling_params import SamplingParams
from tests.support.python_process import run_python
from tests.unit.metrics.observed import TIMES, finished, observe_one_request, scrape, stats

# what dashboards and autoscalers made for vLLM ask for
VLLM_NAMES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prefix_cache_queries vllm:prefix_cache_hits
vllm:prompt_tokens vllm:generation_tokens vllm:request_success vllm:num_preemptions vllm:time_to_first_token_seconds
vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds vllm:request_time_per_output_token_seconds
vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
vllm:request_decode_time_seconds vllm:request_inference_time_seconds vllm:request_prompt_tokens
vllm:request_generation_tokens vllm:request_params_max_tokens vllm:request_params_n vllm:iteration_tokens_total
vllm:cache_config_info vllm:spec_decode_num_drafts vllm:spec_decode_num_accepted_tokens_per_pos
vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens
vllm:external_prefix_cache_queries vllm:external_prefix_cache_hits vllm:mm_cache_queries vllm:mm_cache_hits
""".split()


class Scraped:
    def __init__(self, metrics: ServingMetrics) -> None:
        self._values = scrape(metrics)

    def __call__(self, name: str, **labels: str) -> float:
        own = self._values[PREFIX + name, frozenset(labels.items())]
        alias = self._values.get(("vllm:" + name, frozenset(labels.items())))
        assert alias is None or alias == own
        return own


def test_one_request() -> None:
    metrics = ServingMetrics("m")
    observe_one_request(metrics)
    value = Scraped(metrics)
    assert value("prompt_tokens_total") == 10
    assert value("generation_tokens_total") == 5
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="length") == 0
    assert value("time_to_first_token_seconds_sum") == 0.5
    assert value("time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value("time_to_first_token_seconds_bucket", le="0.3") == 0
    assert value("inter_token_latency_seconds_count") == 4
    assert value("inter_token_latency_seconds_sum") == pytest.approx(1.6)
    assert value("inter_token_latency_seconds_bucket", le="0.2") == 3  # three tokens, 0.2 s each
    assert value("inter_token_latency_seconds_bucket", le="1.0") == 4
    assert value("e2e_request_latency_seconds_sum") == 2.5
    assert value("request_queue_time_seconds_sum") == 0.25
    assert value("request_prefill_time_seconds_sum") == 0.25
    assert value("request_decode_time_seconds_sum") == 2.0
    assert value("request_inference_time_seconds_sum") == 2.25
    assert value("request_time_per_output_token_seconds_sum") == 0.5
    assert value("request_prompt_tokens_sum") == 10
    assert value("request_generation_tokens_sum") == 5
    assert value("request_params_max_tokens_sum") == 64
    assert value("request_params_n_sum") == 1


def test_images() -> None:
    metrics, counts = ServingMetrics("m"), ImageCounts()
    metrics.count_images(counts.totals)
    for _ in range(2):  # a scrape between counts nothing twice
        counts.looked_up(is_hit=True)
        counts.looked_up(is_hit=False)
        counts.processed(0.5)
        counts.refused()
        counts.overloaded()
        counts.overloaded()
        value = Scraped(metrics)
    assert (value("mm_cache_queries_total"), value("mm_cache_hits_total")) == (4, 2)
    assert (value("images_processed_total"), value("image_processing_seconds_total")) == (2, 1.0)
    assert value("images_refused_total", reason="invalid") == 2
    assert value("images_refused_total", reason="queue_full") == 4


def test_the_vision_tower() -> None:
    metrics = ServingMetrics("m")
    first = EncoderCounts(num_queries=3, num_misses=2, num_slices=10, seconds=0.5, usage=0.5)
    second = EncoderCounts(num_queries=1, num_slices=4, seconds=0.25, usage=0.25)
    metrics.stats_changed(dataclasses.replace(stats(), encoder=first + second))
    value = Scraped(metrics)
    assert (value("encoder_cache_queries_total"), value("encoder_cache_misses_total")) == (4, 2)
    assert (value("encoder_slices_total"), value("encoder_seconds_total")) == (14, 0.75)
    assert value("encoder_cache_usage_perc") == 0.25


def test_a_request_that_had_no_token_has_no_latency() -> None:
    metrics = ServingMetrics("m")
    metrics.request_finished(finished("abort", params=SamplingParams(max_tokens=None), times=None))
    value = Scraped(metrics)
    assert value("request_success_total", finished_reason="abort") == 1
    assert value("prompt_tokens_total") == 10
    assert value("e2e_request_latency_seconds_count") == 0
    assert value("request_params_max_tokens_count") == 0


def test_every_completion_counts() -> None:
    metrics = ServingMetrics("m")
    metrics.first_token(0.5)
    for _ in range(2):
        metrics.tokens_generated(1, None)
    for _ in range(3):
        metrics.tokens_generated(4, 2.0)
    metrics.request_finished(finished("stop", "length", "stop", params=SamplingParams(n=3)))
    value = Scraped(metrics)
    assert value("inter_token_latency_seconds_count") == 12
    assert value("generation_tokens_total") == value("request_generation_tokens_sum") == 15
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("request_success_total", finished_reason="length") == 1
    assert value("e2e_request_latency_seconds_count") == 1
    assert value("request_time_per_output_token_seconds_sum") == 0.5


def test_completions_that_came_to_no_token_count_none() -> None:
    metrics = ServingMetrics("m")
    metrics.first_token(0.5)
    metrics.request_finished(finished(*["abort"] * 8, params=SamplingParams(n=8)))
    assert Scraped(metrics)("generation_tokens_total") == 1


def test_what_the_engine_says() -> None:
    metrics = ServingMetrics("m")
    assert math.isnan(Scraped(metrics)("hidden_share"))
    metrics.stats_changed(stats(step_id=7))
    assert Scraped(metrics)("cores_shared") == 0
    metrics.stats_changed(
        dataclasses.replace(
            stats(step_id=12),
            counts=stats().counts
            + StepCounts(num_drafted_rows=10, num_draft_tokens=30, num_accepted_tokens=20, accepted_at=(9, 8, 3)),
            shares_cores=True,
        )
    )
    value = Scraped(metrics)
    assert value("cores_shared") == 1
    assert value("num_requests_running") == 3
    assert value("num_requests_waiting") == 2
    assert value("num_waiting_tokens") == 900
    assert value("kv_cache_usage_perc") == 0.25
    assert value("prefix_cache_queries_total") == 200
    assert value("prefix_cache_hits_total") == 80
    assert value("num_preemptions_total") == 2
    assert value("engine_steps_total") == 5
    assert value("iteration_tokens_total_count") == 4
    assert value("iteration_tokens_total_sum") == 128
    assert value("iteration_tokens_total_bucket", le="5.0") == 2
    assert value("spec_decode_num_drafts_total") == 10
    assert [value("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)] == [11, 8, 3]
    assert value("spec_decode_num_draft_tokens_total") == 30
    assert value("spec_decode_num_accepted_tokens_total") == 20
    assert value("step_gap_seconds_count") == 4
    assert value("step_gap_seconds_bucket", le="0.001") == 2
    assert value("hidden_share") == 0.9
    assert value("engine_up") == 1
    metrics.engine_died()
    value = Scraped(metrics)
    assert value("engine_up") == 0
    assert value("num_requests_running") == 0


def test_what_transfers_of_kv_blocks_have_done() -> None:
    metrics = ServingMetrics("m")
    transfers = TransferCounts(
        num_queried_tokens=101,
        num_hit_tokens=102,
        num_skipped_saves=103,
        num_failed=104,
        num_late=105,
        load_bytes=106,
        save_bytes=107,
        load_seconds=0.5,
        save_seconds=0.25,
        tiers={"disk": {"reads": 3.0, "bytes": 4.0}, "server": {"reads": 5.0}},
    )
    for _ in range(2):
        metrics.stats_changed(dataclasses.replace(stats(), transfers=transfers, step_time_ratios=(0.75, 1.5)))
    value = Scraped(metrics)
    assert value("external_prefix_cache_queries_total") == 202
    assert value("external_prefix_cache_hits_total") == 204
    assert value("kv_offload_skipped_blocks_total") == 206
    assert value("kv_offload_failures_total") == 208
    assert value("kv_offload_late_requests_total") == 210
    assert value("kv_offload_load_bytes_total") == 212
    assert value("kv_offload_store_bytes_total") == 214
    assert value("kv_offload_load_time_total") == 1.0
    assert value("kv_offload_store_time_total") == 0.5
    assert value("kv_tier_total", tier="disk", what="reads") == 6
    assert value("kv_tier_total", tier="disk", what="bytes") == 8
    assert value("kv_tier_total", tier="server", what="reads") == 10
    assert (value("step_time_ratio_count"), value("step_time_ratio_sum")) == (4, 4.5)


def test_each_engine_has_its_own_transfers() -> None:
    metrics = ServingMetrics("m", engines=range(2))
    transfers = TransferCounts(load_bytes=6, tiers={"disk": {"reads": 3.0}})
    report = dataclasses.replace(stats(), engine=1, transfers=transfers, step_time_ratios=(2.0,), shares_cores=True)
    metrics.stats_changed(report)
    value = Scraped(metrics)
    assert [value("kv_offload_load_bytes_total", engine=engine) for engine in "01"] == [0, 6]
    assert value("kv_tier_total", engine="1", tier="disk", what="reads") == 3
    assert value("step_time_ratio_sum", engine="1") == 2
    assert [value("cores_shared", engine=engine) for engine in "01"] == [0, 1]
    for name, expected in (("prefix_cache_queries", 100), ("prefix_cache_hits", 40), ("num_preemptions", 1)):
        assert [value(f"{name}_total", engine=engine) for engine in "01"] == [0, expected]


def test_only_one_front_end_counts_what_the_engine_says() -> None:
    metrics = ServingMetrics("m", records_engine=False)
    before = scrape(metrics)
    metrics.stats_changed(stats())
    metrics.faults_changed(FaultStatus())
    metrics.faults_changed(FaultStatus(state="recovering", num_recoveries={"rank_died": 1}))
    metrics.engine_ended(0)
    assert scrape(metrics) == before
    metrics.request_refused("queue_full")
    assert Scraped(metrics)("requests_refused_total", reason="queue_full") == 1


def test_an_engine_that_is_gone_has_no_requests() -> None:
    metrics = ServingMetrics("m")
    metrics.stats_changed(stats())
    metrics.engine_ended(0)
    value = Scraped(metrics)
    assert [value(name) for name in ("engine_up", "num_requests_running", "num_requests_waiting")] == [0, 0, 0]


@pytest.mark.parametrize(("num_tokens", "count"), [(5, 0), (6, 1)])
def test_a_completion_of_one_token_has_no_time_between_tokens(num_tokens: int, count: int) -> None:
    metrics = ServingMetrics("m")
    reasons = ["stop"] * 5
    metrics.request_finished(dataclasses.replace(finished(*reasons), num_generation_tokens=num_tokens))
    assert Scraped(metrics)("request_time_per_output_token_seconds_count") == count


def test_counts_that_fall_are_those_of_a_new_engine() -> None:
    """A counter never falls: after an engine that began anew, steps and recoveries are counted from there."""
    metrics = ServingMetrics("m")
    for step_id, num_stale in ((9, 5), (2, 1), (4, 3)):
        metrics.stats_changed(stats(step_id))
        metrics.faults_changed(FaultStatus(num_stale_frames=num_stale))
    value = Scraped(metrics)
    assert (value("engine_steps_total"), value("stale_frames_total")) == (2, 2)


def test_metrics_of_several_engines_have_a_label() -> None:
    metrics = ServingMetrics("m", engines=range(2))
    value = Scraped(metrics)
    assert all(value("num_preemptions_total", engine=engine) == 0 for engine in "01"), "from the start"
    assert math.isnan(value("hidden_share", engine="1"))
    for step_id in (5, 8):
        metrics.stats_changed(stats(step_id))
        metrics.stats_changed(dataclasses.replace(stats(10 * step_id), engine=1, num_running=9))
    metrics.kv_cache_made(16, 300, 1)
    value = Scraped(metrics)
    assert [value("engine_steps_total", engine=engine) for engine in "01"] == [3, 30]
    assert [value("num_requests_running", engine=engine) for engine in "01"] == [3, 9]
    assert value("step_gap_seconds_count", engine="1") == 4
    assert value("cache_config_info", engine="1", block_size="16", num_gpu_blocks="300") == 1
    assert value("prompt_tokens_total") == 0  # of the server
    assert [value("engine_up", engine=engine) for engine in "01"] == [1, 1]
    metrics.engine_ended(1)
    value = Scraped(metrics)
    assert [value("engine_up", engine=engine) for engine in "01"] == [1, 0]
    assert [value("num_requests_running", engine=engine) for engine in "01"] == [3, 0]
    metrics.engine_died()
    assert Scraped(metrics)("engine_up", engine="0") == 0


def test_the_size_of_the_kv_cache() -> None:
    metrics = ServingMetrics("m")
    metrics.kv_cache_made(16, 300)
    assert Scraped(metrics)("cache_config_info", block_size="16", num_gpu_blocks="300") == 1
    other = ServingMetrics("m", records_engine=False)
    other.kv_cache_made(16, 300)
    assert not [name for name, _ in scrape(other) if "cache_config_info" in name]


def test_http() -> None:
    metrics = ServingMetrics("m")
    metrics.http_request("/v1/completions", 200, 0.05)
    metrics.http_request("/v1/completions", 503, 0.001)
    metrics.request_refused("queue_full")
    value = Scraped(metrics)
    assert value("http_requests_total", route="/v1/completions", status="200") == 1
    assert value("http_requests_total", route="/v1/completions", status="503") == 1
    assert value("http_request_duration_seconds_count", route="/v1/completions") == 2
    assert value("requests_refused_total", reason="queue_full") == 1


def test_every_alias_is_there_and_of_its_kind() -> None:
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(ServingMetrics("m").render("")[0].decode())
    }
    for instrument in INSTRUMENTS:
        for name in (instrument.full_name, *instrument.aliases):
            assert families.pop(name) == instrument.kind
    assert families == {}
    assert {alias for instrument in INSTRUMENTS for alias in instrument.aliases} == set(VLLM_NAMES)


def test_a_scraper_gets_the_format_it_asks_for() -> None:
    metrics = ServingMetrics("m")
    body, content_type = metrics.render("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert metrics.render("*/*")[1].startswith("text/plain")
    assert metrics.render('application/openmetrics-text; version="1.0.0"')[1].startswith("application/openmetrics-text")


@pytest.mark.parametrize(
    "value", ["a.b", "1.x", "", "1.0.0.0", '"1', "-1", "99999999999999999999.0.0", "\u0131", "1;escaping=?"]
)
@pytest.mark.parametrize(
    "form", ["text/plain; version=%s", "application/openmetrics-text; version=%s; q=x", "%s", ";%s,=;,/"]
)
def test_any_accept_header_gets_an_answer(form: str, value: str) -> None:
    body, content_type = ServingMetrics("m").render(form % value)
    assert body.startswith(b"# HELP") and content_type.startswith(("text/plain", "application/openmetrics-text"))


def test_buckets_are_in_order() -> None:
    for instrument in INSTRUMENTS:
        assert list(instrument.buckets) == sorted(set(instrument.buckets)), instrument.name
        assert bool(instrument.buckets) == (instrument.kind == "histogram")


def test_many_tokens_cost_as_much_as_one() -> None:
    metrics = ServingMetrics("m")
    start = time.thread_time()
    metrics.tokens_generated(10**9, 10**9 * 0.02)  # a loop would take minutes
    assert time.thread_time() - start < 1.0
    assert Scraped(metrics)("inter_token_latency_seconds_bucket", le="0.02") == 10**9


def test_what_was_scraped_is_not_counted_again() -> None:
    metrics = ServingMetrics("m")
    for count in (1, 2, 3):
        metrics.first_token(0.1)
        metrics.tokens_generated(2, 0.04)
        scraped = Scraped(metrics)
        assert scraped("generation_tokens_total") == 3 * count
        assert scraped("inter_token_latency_seconds_count") == 2 * count
        assert scraped("inter_token_latency_seconds_sum") == pytest.approx(0.04 * count)


FRONT_END = """
import json, sys
from inflight.metrics.serving import ServingMetrics
from tests.unit.metrics.observed import observe_one_request, scrape, stats
index = int(sys.argv[1])
metrics = ServingMetrics("m", records_engine=index == 0)
observe_one_request(metrics)
metrics.stats_changed(stats(step_id=1))
metrics.stats_changed(stats(step_id=3))
metrics.http_request("/health", 200, 0.01)
if index == 2:
    print(json.dumps([[name, sorted(labels), value] for (name, labels), value in scrape(metrics).items()]))
"""


def test_several_front_ends_add_up(tmp_path: Path) -> None:
    """Three processes, all told of the same steps; the last of them, which does not count steps, is scraped."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for index in range(3):
        command = [sys.executable, "-c", FRONT_END, str(index)]
        printed = run_python(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    values = {(name, *(f"{k}={v}" for k, v in labels)): value for name, labels, value in json.loads(printed)}
    for prefix in (PREFIX, "vllm:"):
        assert values[prefix + "generation_tokens_total",] == 15
        assert values[prefix + "inter_token_latency_seconds_count",] == 12
        assert values[prefix + "inter_token_latency_seconds_bucket", "le=0.2"] == 9
        assert values[prefix + "request_success_total", "finished_reason=stop"] == 3
        assert values[prefix + "num_requests_running",] == 3
        assert values[prefix + "prefix_cache_queries_total",] == 200
        assert values[prefix + "num_preemptions_total",] == 2
    assert values["inflight:engine_up",] == 1
    assert values["inflight:engine_steps_total",] == 2
    assert values["inflight:step_gap_seconds_count",] == 4
    assert values["inflight:http_requests_total", "route=/health", "status=200"] == 3


def test_recoveries_are_counted_from_the_status_at_the_start() -> None:
    metrics = ServingMetrics("m")
    metrics.faults_changed(FaultStatus(num_recoveries={"engine_died": 2}, num_resumed_requests=5))
    metrics.faults_changed(
        FaultStatus(state="recovering", num_recoveries={"engine_died": 2}, num_resumed_requests=5, num_stale_frames=4)
    )
    assert Scraped(metrics)("engine_recovering") == 1
    counts = {"engine_died": 3, "rank_died": 1}
    metrics.faults_changed(FaultStatus(num_recoveries=counts, num_resumed_requests=9, last_recovery_seconds=1.5))
    value = Scraped(metrics)
    assert value("engine_recovering") == 0
    assert [value("recoveries_total", cause=cause) for cause in FAULT_CAUSES] == [1, 0, 0, 0, 1, 0]
    assert (value("resumed_requests_total"), value("stale_frames_total")) == (4, 4)
    assert value("last_recovery_seconds") == 1.5


def test_a_request_for_vectors_has_no_tokens_of_an_answer() -> None:
    metrics = ServingMetrics("m")
    times = dataclasses.replace(TIMES, first_token_time=None)
    metrics.request_finished(
        dataclasses.replace(finished("stop", times=times), num_generation_tokens=0, makes_text=False)
    )
    value = Scraped(metrics)
    assert value("prompt_tokens_total") == 10
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("e2e_request_latency_seconds_sum") == 2.5
    assert value("request_queue_time_seconds_sum") == 0.25
    assert value("request_inference_time_seconds_sum") == 2.25
    for name in (
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_params_n",
    ):
        assert value(f"{name}_count") == 0, name
    assert value("time_to_first_token_seconds_count") == 0
