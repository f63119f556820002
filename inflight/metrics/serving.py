"""`ServingMetrics`: the observer that turns the engine's reports into Prometheus metrics."""

import math
from collections.abc import Callable

from inflight.interface.expert_counts import ExpertCounts
from inflight.interface.image_prompts import ImageTotals
from inflight.interface.statistics import FAULT_CAUSES, FaultStatus, SchedulerStats, TransferCounts
from inflight.metrics.exposition import CountingHistogram, Exposition
from inflight.metrics.instruments import FINISHED_REASONS, INSTRUMENTS
from inflight.metrics.observer import EngineObserver, FinishedRequest

IMAGE_REASONS = ("invalid", "queue_full")  # why an image is refused


class ServingMetrics(EngineObserver):
    """One per front end, on its event loop. `instruments.py` says what each metric means.

    Every front end gets the engine's statistics, but only the front end with `records_engine` counts them. Tokens are counted
    in plain numbers. These are added to prometheus_client's metrics at the next statistics, when a request ends, and before a
    scrape.
    """

    def __init__(self, model_name: str, *, records_engine: bool = True, engines: range | None = None) -> None:
        self._engines = engines or range(1)
        self._metrics = Exposition(INSTRUMENTS, model_name, engines)
        self._records_engine = records_engine
        self._last_steps: dict[int, int] = {}  # engine -> the step id in its newest report
        self._faults: FaultStatus | None = None
        self._inter_token: CountingHistogram = self._metrics.get("inter_token_latency_seconds")
        self._num_pending_tokens = 0
        self._read_images: Callable[[], ImageTotals | None] = lambda: None
        self._images = ImageTotals()
        for reason in IMAGE_REASONS:
            self._metrics.get("images_refused", reason)
        for reason in FINISHED_REASONS:  # so that each is exposed from the start, as zero
            self._metrics.get("request_success", reason)
        if records_engine:
            for engine in self._engines:
                self._set("engine_up", 1, engine=engine)
                self._set("hidden_share", math.nan, engine=engine)

    def kv_cache_made(self, block_size: int, num_blocks: int, engine: int = 0) -> None:
        """The engine is ready. Call this once for each engine: each call with other numbers adds a sample."""
        if self._records_engine:
            self._metrics.get("cache_config_info", str(block_size), str(num_blocks), engine=engine).set(1)

    def count_images(self, totals: Callable[[], ImageTotals | None]) -> None:
        """`totals`: says what was done with images so far; None if the model takes none."""
        self._read_images = totals

    def stats_changed(self, stats: SchedulerStats) -> None:
        self._flush()
        if not self._records_engine:
            return
        engine = stats.engine
        counts = stats.counts
        self._set("num_requests_running", stats.num_running, engine=engine)
        self._set("num_requests_waiting", stats.num_waiting, engine=engine)
        self._set("num_waiting_tokens", stats.num_waiting_tokens, engine=engine)
        self._set("kv_cache_usage_perc", stats.kv_cache_usage, engine=engine)
        self._inc("prefix_cache_queries", counts.num_queried_tokens, engine=engine)
        self._inc("prefix_cache_hits", counts.num_hit_tokens, engine=engine)
        self._inc("num_preemptions", counts.num_preemptions, engine=engine)
        self._inc("spec_decode_num_drafts", counts.num_drafted_rows, engine=engine)
        for position, count in enumerate(counts.accepted_at):
            self._inc("spec_decode_num_accepted_tokens_per_pos", count, str(position), engine=engine)
        self._inc("spec_decode_num_draft_tokens", counts.num_draft_tokens, engine=engine)
        self._inc("spec_decode_num_accepted_tokens", counts.num_accepted_tokens, engine=engine)
        if (last_step := self._last_steps.get(engine)) is not None:
            self._inc("engine_steps", max(0, stats.step_id - last_step), engine=engine)
        self._last_steps[engine] = stats.step_id
        for count in stats.step_tokens:
            self._observe("iteration_tokens_total", count, engine=engine)
        for gap in stats.step_gaps:
            self._observe("step_gap_seconds", gap, engine=engine)
        for ratio in stats.step_time_ratios:
            self._observe("step_time_ratio", ratio, engine=engine)
        self._set("cores_shared", stats.shares_cores, engine=engine)
        if stats.transfers is not None:
            self._count_transfers(stats.transfers, engine)
        if (encoder := stats.encoder) is not None:
            self._inc("encoder_cache_queries", encoder.num_queries, engine=engine)
            self._inc("encoder_cache_misses", encoder.num_misses, engine=engine)
            self._inc("encoder_slices", encoder.num_slices, engine=engine)
            self._inc("encoder_seconds", encoder.seconds, engine=engine)
            self._set("encoder_cache_usage_perc", encoder.usage, engine=engine)
        if stats.experts is not None:
            self._count_experts(stats.experts, engine)
        if stats.hidden_share is not None:
            self._set("hidden_share", stats.hidden_share, engine=engine)

    def _count_experts(self, counts: ExpertCounts, engine: int) -> None:
        if counts.balance is not None:
            self._set("expert_balance", counts.balance, engine=engine)
        self._inc("expert_rebalances", counts.num_rebalances, "done", engine=engine)
        self._inc("expert_rebalances", counts.num_given_up, "given_up", engine=engine)
        self._inc("expert_copies", counts.num_copies, engine=engine)

    def _count_transfers(self, counts: TransferCounts, engine: int) -> None:
        self._inc("external_prefix_cache_queries", counts.num_queried_tokens, engine=engine)
        self._inc("external_prefix_cache_hits", counts.num_hit_tokens, engine=engine)
        self._inc("kv_offload_load_bytes", counts.load_bytes, engine=engine)
        self._inc("kv_offload_store_bytes", counts.save_bytes, engine=engine)
        self._inc("kv_offload_load_time", counts.load_seconds, engine=engine)
        self._inc("kv_offload_store_time", counts.save_seconds, engine=engine)
        self._inc("kv_offload_skipped_blocks", counts.num_skipped_saves, engine=engine)
        self._inc("kv_offload_failures", counts.num_failed, engine=engine)
        self._inc("kv_offload_late_requests", counts.num_late, engine=engine)
        for tier, numbers in counts.tiers.items():
            for what, number in numbers.items():
                self._inc("kv_tier", number, tier, what, engine=engine)

    def faults_changed(self, status: FaultStatus) -> None:
        """Count the recoveries since the previous status. The first status is not counted: its recoveries happened before this
        front end started."""
        if not self._records_engine:
            return
        last = self._faults or status
        self._faults = status
        self._set("engine_recovering", status.state == "recovering")
        self._set("last_recovery_seconds", status.last_recovery_seconds)
        for cause in FAULT_CAUSES:
            self._inc(
                "recoveries", _rise(last.num_recoveries.get(cause, 0), status.num_recoveries.get(cause, 0)), cause
            )
        self._inc("resumed_requests", _rise(last.num_resumed_requests, status.num_resumed_requests))
        self._inc("stale_frames", _rise(last.num_stale_frames, status.num_stale_frames))

    def first_token(self, seconds: float) -> None:
        self._observe("time_to_first_token_seconds", seconds)
        self._num_pending_tokens += 1

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        if seconds is not None:
            self._inter_token.observe_many(seconds / count, count)
        self._num_pending_tokens += count

    def request_finished(self, request: FinishedRequest) -> None:
        self._flush()
        self._inc("prompt_tokens", request.num_prompt_tokens)
        for reason in request.finish_reasons:
            self._inc("request_success", 1, reason)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        if request.makes_text:
            self._observe("request_generation_tokens", request.num_generation_tokens)
            self._observe("request_params_n", request.params.n)
            if request.params.max_tokens is not None:
                self._observe("request_params_max_tokens", request.params.max_tokens)
        times = request.metrics
        if times is None:
            return
        self._observe("e2e_request_latency_seconds", times.finished_time - times.arrival_time)
        self._observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        self._observe("request_inference_time_seconds", times.finished_time - times.first_scheduled_time)
        if times.first_token_time is None:
            return
        decode_seconds = times.finished_time - times.first_token_time
        self._observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        self._observe("request_decode_time_seconds", decode_seconds)
        num_further = request.num_generation_tokens / len(request.finish_reasons) - 1  # of one completion, on average
        if num_further > 0:
            self._observe("request_time_per_output_token_seconds", decode_seconds / num_further)

    def engine_ended(self, engine: int) -> None:
        if self._records_engine:
            for name in ("engine_up", "num_requests_running", "num_requests_waiting"):
                self._set(name, 0, engine=engine)

    def engine_died(self) -> None:
        """From now on `engine_up` of all engines is 0."""
        for engine in self._engines:
            self.engine_ended(engine)

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """The last byte of an answer has been sent. `route` is the route's pattern, not the path of the request."""
        self._inc("http_requests", 1, route, str(status))
        self._observe("http_request_duration_seconds", seconds, route)

    def request_refused(self, reason: str) -> None:
        """A request was refused before it started. `reason` is a label value, such as "queue_full" or "draining"."""
        self._inc("requests_refused", 1, reason)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the body and the content type of the answer to a scrape with this `Accept` header, for all front ends."""
        self._flush()
        return self._metrics.render(accept)

    def _inc(self, name: str, count: float, *labels: str, engine: int = 0) -> None:
        self._metrics.get(name, *labels, engine=engine).inc(count)

    def _set(self, name: str, value: float, *, engine: int = 0) -> None:
        self._metrics.get(name, engine=engine).set(value)

    def _observe(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        self._metrics.get(name, *labels, engine=engine).observe(value)

    def _flush(self) -> None:
        if (now := self._read_images()) is not None and now != self._images:
            before, self._images = self._images, now
            self._inc("mm_cache_queries", now.num_queries - before.num_queries)
            self._inc("mm_cache_hits", now.num_hits - before.num_hits)
            self._inc("images_processed", now.num_processed - before.num_processed)
            self._inc("image_processing_seconds", now.processing_seconds - before.processing_seconds)
            for reason, count in (
                ("invalid", now.num_refused - before.num_refused),
                ("queue_full", now.num_overloaded - before.num_overloaded),
            ):
                self._inc("images_refused", count, reason)
        if self._num_pending_tokens:
            self._inc("generation_tokens", self._num_pending_tokens)
            self._num_pending_tokens = 0
            self._inter_token.flush()


def _rise(last: int, present: int) -> int:
    return max(present - last, 0)
