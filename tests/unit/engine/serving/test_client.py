"""`Shares`: a client that fills a limit is refused before the others are, and a client that is alone never."""

from __future__ import annotations

from inflight.engine.serving.client import KEPT_SECONDS, Shares


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_part_is_kept_for_other_clients() -> None:
    shares = Shares()
    shares.hold(1, "a", 100)
    assert shares.most("a", 80) == 80, "nobody else was ever there"
    assert shares.most("b", 80) == 80
    assert shares.most("a", 80) == 70
    shares.hold(2, "b", 100)
    assert shares.most("a", 80) == 80, "a has no more than half"
    shares.hold(2, "b", 101)
    assert shares.most("b", 80) == 70
    shares.release(2)
    shares.release(2)
    assert shares.most("b", 80) == 80
    assert shares.most("a", 80) == 70


def test_it_is_kept_only_for_a_while() -> None:
    clock = Clock()
    shares = Shares(clock)
    shares.hold(1, "a", 100)
    shares.most("b", 80)
    clock.seconds = KEPT_SECONDS - 1
    assert shares.most("a", 80) == 70
    clock.seconds += 1
    assert shares.most("a", 80) == 80


def test_of_many_clients_each_has_others() -> None:
    shares = Shares()
    shares.hold(1, "a", 100)
    for client in "bcda":
        shares.most(client, 80)
    assert shares.most("a", 80) == 70
    assert shares.most("a", 7) == 7, "too few places to keep one"
