"""The cores of a group come to the same epoch, whatever is lost meanwhile, and know of all its steps."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.lockstep.group import Address, LockstepGroup, Phase


class Net:
    """Cores in one thread. Messages of a link come in order, and as late as `deliver` is called."""

    def __init__(self, size: int) -> None:
        self.links: dict[tuple[int, int], deque[Any]] = {}
        self.num_starts = [0] * size
        self.groups: list[LockstepGroup] = [self._new(index, size) for index in range(size)]
        for index in range(size):
            self._connect(index)

    def _new(self, index: int, size: int) -> LockstepGroup:
        self.num_starts[index] += 1
        return LockstepGroup(index, size, lambda peer, message: self._send(index, peer, message))

    def _send(self, sender: int, receiver: int, message: object) -> None:
        if (sender, receiver) in self.links:
            self.links[sender, receiver].append(json.loads(json.dumps(message)))

    def _connect(self, index: int) -> None:
        for peer in range(len(self.groups)):
            if peer != index:
                self.links.setdefault((index, peer), deque(["came"]))
                self.links.setdefault((peer, index), deque(["came"]))

    def restart(self, index: int) -> None:
        """The core ends, and another one takes its place. What it has sent before arrives nevertheless."""
        for peer in range(len(self.groups)):
            if peer != index:
                self.links[index, peer].extend(["lost", "came"])
                self.links[peer, index] = deque(["came"])
        self.groups[index] = self._new(index, len(self.groups))

    def deliver(self, sender: int, receiver: int) -> None:
        queue, group = self.links[sender, receiver], self.groups[receiver]
        if queue:
            match queue.popleft():
                case "came":
                    group.link_came(sender)
                case "lost":
                    group.link_lost(sender)
                case message:
                    group.take(sender, message)

    def addresses(self, index: int) -> list[Address]:
        return [(f"core {index}, start {self.num_starts[index]}", 80)]

    def advance(self, index: int) -> None:
        """What a core does by itself. Its ranks meet the others at once."""
        group = self.groups[index]
        if group.phase is Phase.OVER:
            group.begin(self.addresses(index))
        elif group.can_join:
            group.join()
        elif group.phase is Phase.JOINING:
            group.run()

    def settle(self) -> None:
        for _ in range(100):
            for sender, receiver in self.links:
                while self.links[sender, receiver]:
                    self.deliver(sender, receiver)
            for index in range(len(self.groups)):
                self.advance(index)
        assert [group.phase for group in self.groups] == [Phase.RUNNING] * len(self.groups)
        assert len({group.epoch for group in self.groups}) == 1


def running(size: int = 2) -> Net:
    net = Net(size)
    net.settle()
    return net


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["deliver", "advance", "fault", "restart", "step"]), st.integers(0, 2), st.integers(0, 2)
    ),
    max_size=60,
)


@given(events=EVENTS)
def test_all_cores_come_to_the_same_epoch_whatever_happens(events: list[tuple[str, int, int]]) -> None:
    net = Net(3)
    for kind, index, other in events:
        group = net.groups[index]
        match kind:
            case "deliver" if index != other:
                net.deliver(index, other)
            case "advance":
                net.advance(index)
            case "fault":
                group.leave("bad luck")
            case "restart":
                net.restart(index)
            case "step" if group.phase is Phase.RUNNING:
                group.announce(group.target + 1)
    net.settle()
    epoch, highest = net.groups[0].epoch, max(group.target for group in net.groups)
    net.groups[1].announce(highest + 1)
    net.settle()
    assert [(group.epoch, group.target) for group in net.groups] == [(epoch, highest + 1)] * 3


def test_ranks_meet_at_the_addresses_of_the_newest_cores() -> None:
    net = running(3)
    net.restart(1)
    joined: list[list[Address]] = []
    for _ in range(20):
        for sender, receiver in net.links:
            net.deliver(sender, receiver)
        for index, group in enumerate(net.groups):
            if group.can_join:
                joined.append(group.join())
            else:
                net.advance(index)
    newest = [address for index in range(3) for address in net.addresses(index)]
    assert joined == [newest] * 3 and newest[1] == ("core 1, start 2", 80)


def test_a_step_is_announced_once() -> None:
    net = running()
    first, second = net.groups
    first.announce(1)
    assert list(net.links[0, 1]) == [{"step": [1, 1]}]
    net.settle()
    second.announce(1)  # all know of it
    assert not net.links[1, 0] and (first.target, second.target) == (1, 1)


def test_a_step_of_another_epoch_does_not_count() -> None:
    net = running()
    first, second = net.groups
    first.announce(3)
    first.leave("bad luck")
    net.settle()
    assert (first.epoch, first.target, second.target) == (2, 0, 0)
    first.announce(1)
    net.settle()
    assert second.target == 1


def test_a_step_may_be_heard_of_before_the_own_ranks_have_joined() -> None:
    net = Net(2)
    first, second = net.groups
    for _ in range(2):
        for sender, receiver in [(0, 1), (1, 0)] * 2:
            net.deliver(sender, receiver)
        net.advance(0)
        net.advance(1)
    net.advance(0)
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.JOINING)
    first.announce(1)
    net.deliver(0, 1)
    net.advance(1)
    assert (second.phase, second.target) == (Phase.RUNNING, 1)


def test_the_loss_of_a_core_ends_the_epoch_and_says_which_is_missing() -> None:
    net = running()
    first = net.groups[0]
    first.link_lost(1)
    assert first.phase is Phase.OVER and first.reason == "the engine core of replica 1 was lost"
    first.begin([])
    assert (first.epoch, first.missing) == (2, [1])


def test_messages_without_a_link_or_of_a_strange_kind_are_dropped() -> None:
    group = LockstepGroup(0, 2, lambda peer, message: None)
    group.begin([])
    group.take(1, {"ready": 5, "addresses": []})
    assert group.epoch == 1
    group.link_came(1)
    for message in ({"ready": "x", "addresses": []}, {"step": [1]}, {}, None, 3, {"over": 1}):
        group.take(1, message)
    assert (group.epoch, group.phase, group.target) == (1, Phase.MEETING, 0)


def test_a_core_that_ends_because_the_engine_is_closed_says_so() -> None:
    net = running()
    net.groups[0].say_goodbye()
    net.deliver(0, 1)
    assert net.groups[1].is_closing
    net.restart(0)
    net.settle()
    assert not net.groups[1].is_closing


def test_an_older_step_that_is_heard_of_later_takes_nothing_back() -> None:
    """Two cores may announce steps at the same time, and their links are not equally fast."""
    net = running(3)
    first, second, third = net.groups
    first.announce(4)
    third.announce(4)
    first.announce(5)
    for sender in (0, 0, 2):
        net.deliver(sender, 1)
    assert second.target == 5
