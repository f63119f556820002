"""What the agents' rows say of turns."""

from __future__ import annotations

from benchmarks.kv_tiers.agents import Turn, _hits


def test_first_turns_do_not_count_and_the_new_message_is_no_hit() -> None:
    turns = [
        Turn(num_said=0, num_new=40, num_found=32, seconds=1.0),  # another session began in the same way
        Turn(num_said=100, num_new=40, num_found=96, seconds=1.0),
        Turn(num_said=300, num_new=40, num_found=304, seconds=1.0),
    ]
    found, most = _hits("x", turns)
    assert found.values == [(96 + 300) / 400] and found.is_reached
    assert most.values == [4] and most.is_reached


def test_a_session_that_is_computed_again_is_seen() -> None:
    found, most = _hits("x", [Turn(100, 40, 96, 1.0), Turn(100, 40, 0, 1.0)])
    assert not found.is_reached and not most.is_reached and most.values == [100]
