"""What operators see of an `AsyncLLM`: its observers, and whether it is ready."""

from __future__ import annotations

import asyncio

from inflight.interface.statistics import SchedulerStats
from inflight.metrics.log_lines import CANARY_TOKENS
from inflight.metrics.observer import EngineObserver, FinishedRequest
from tests.unit.engine.serving.event_loop import run, until
from tests.unit.engine.serving.serving import endless, mock_engine, read, submit


class Observed(EngineObserver):
    """An observer that keeps all it hears."""

    def __init__(self) -> None:
        self.stats: list[SchedulerStats] = []
        self.first: list[float] = []
        self.further: list[tuple[int, float | None]] = []
        self.finished: list[FinishedRequest] = []

    def stats_changed(self, stats: SchedulerStats) -> None:
        self.stats.append(stats)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        self.further.append((count, seconds))

    def request_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)


def test_observers_hear_of_tokens_ends_and_the_engines_state() -> None:
    async def test() -> None:
        observed = Observed()
        async with mock_engine({"max_num_seqs": 4}, observers=[observed]) as engine:
            prompt = [7] * 64
            request = await engine.process("a", prompt, endless(30), trace_headers={"traceparent": "x"})
            await read(engine.submit(request))
            await read(await submit(engine, "b", prompt, endless(30)))
            stream = await submit(engine, "c", prompt, endless())
            await until(lambda: len(observed.first) == 3)
            stream.abort()
            await until(lambda: sum(each.counts.num_queried_tokens for each in observed.stats) == 3 * 64)
            heard = sum(request.num_generation_tokens for request in observed.finished)
            await until(lambda: sum(each.counts.num_sampled_tokens for each in observed.stats) >= heard)
        a, b, c = observed.finished
        assert (a.request_id, a.num_prompt_tokens, a.num_cached_tokens, a.num_generation_tokens) == ("a", 64, 0, 30)
        assert (a.finish_reasons, c.finish_reasons) == (("length",), ("abort",))
        assert a.trace_headers == {"traceparent": "x"}
        assert b.num_cached_tokens == 48
        assert a.metrics is not None
        assert a.arrival_time <= a.metrics.first_scheduled_time <= a.metrics.first_token_time <= a.finished_time
        generated = sum(request.num_generation_tokens for request in observed.finished)
        assert sum(count for count, _ in observed.further) + len(observed.first) == generated
        stats = observed.stats
        assert sum(each.counts.num_queried_tokens for each in stats) == 3 * 64
        assert sum(each.counts.num_hit_tokens for each in stats) == 2 * 48
        assert generated <= sum(each.counts.num_sampled_tokens for each in stats) < 30 + 30 + 1500, "c was cut off"
        assert [each.step_id for each in stats] == sorted(each.step_id for each in stats)
        assert any(each.num_running == 1 and each.kv_cache_usage > 0 for each in stats)
        shares = [each.hidden_share for each in stats if each.hidden_share is not None]
        assert shares
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert sum(len(each.step_gaps) for each in stats) > 50

    run(test)


def test_an_idle_engine_shows_by_a_step_that_it_is_ready() -> None:
    async def test() -> None:
        observed = Observed()
        async with mock_engine(observers=[observed]) as engine:
            await asyncio.gather(engine.check_ready(), engine.check_ready())
            await engine.check_ready()  # the first one's token is young enough
            await engine.check_health()
            await until(lambda: bool(observed.stats) and observed.stats[-1].num_running == 0)
            assert observed.stats[-1].step_id == 4  # the engine measured steps 0 to 3 when it started
            assert sum(each.counts.num_queried_tokens for each in observed.stats) == CANARY_TOKENS, (
                "the log has no line for it"
            )
            assert not observed.finished  # it is nobody's request
            await engine.reset_prefix_cache()

    run(test)
