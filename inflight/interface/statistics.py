"""`SchedulerStats`: what the engine core reports to its front ends. They use it for metrics and to limit the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The engine's state after a step, and counts since the last report.

    Attributes:
        step_id: the id of the newest committed step.
        num_running: requests that have been in a step and have not ended.
        num_waiting: requests that wait for their first step, for blocks or for a grammar.
        num_waiting_tokens: the tokens of waiting requests that are not computed yet. If the n sequences of a request share a
            prompt, its tokens count once.
        kv_cache_usage: share of the KV blocks in use, in [0, 1].
        prefix_cache_queries: prompt tokens looked up since the last report.
        prefix_cache_hits: how many of these tokens were found.
        num_preemptions: preemptions since the last report.
        num_generation_tokens: tokens added to requests since the last report.
        num_draft_tokens: drafts that were verified since the last report.
        num_accepted_tokens: how many of these drafts were accepted.
        step_gaps: for each step since the last report, the seconds that the devices were idle before it.
        step_time_ratios: for each step since the last report whose time was predicted, the measured time divided by it.
        hidden_share: which share of the host's work was done while a device computed a step. None if there was no step since
            the last report.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_cache_usage: float
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    step_gaps: tuple[float, ...] = ()
    step_time_ratios: tuple[float, ...] = ()
    hidden_share: float | None = None
