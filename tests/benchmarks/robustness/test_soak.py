"""The requests of the soak are drawn from a seed, and growth is that after the warm-up."""

from __future__ import annotations

from benchmarks.robustness.soak import draw_requests, growth_bytes


def test_growth_is_that_after_the_warm_up() -> None:
    assert growth_bytes([0, 50, 100, 100, 100, 100, 100, 100]) == 0
    assert growth_bytes([0, 10, 20, 30, 40, 50, 60, 70]) == 40
    assert growth_bytes([5]) == 0


def test_the_soak_draws_the_same_requests_again() -> None:
    requests = list(draw_requests(1, 200, 128, 48))
    assert requests == list(draw_requests(1, 200, 128, 48))
    assert requests != list(draw_requests(2, 200, 128, 48))
    assert max(len(prompt) for prompt, _, _ in requests) < 128 + 64
    assert any(params.n == 2 for _, params, _ in requests)
    assert any(abort_after is not None for _, _, abort_after in requests)
