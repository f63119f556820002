"""`LockstepGroup`: what an engine core knows of the other cores with which it keeps step. It neither waits nor reads a clock.

An epoch of the group is a time in which the ranks of all replicas are connected. Its steps have the numbers 1, 2, 3, ...

    OVER      the core must repair its ranks, and then call `begin`
    MEETING   the ranks of this core listen for those of other replicas, until all cores say so for the same epoch
    JOINING   the ranks of all replicas connect to each other
    RUNNING   steps run

What cores send each other, as JSON:

    {"ready": epoch, "addresses": [[host, port], ...]}   my ranks listen here, for this epoch
    {"step": [epoch, number]}                            I have submitted this step, with rows
    {"over": epoch}                                      I have left this epoch
    {"bye": epoch}                                       I end, because the engine is closed

Whoever leaves an epoch wants the next one. The highest number that any core wants wins: a core that has said a lower one says
the higher one, too. So all come to the same number, however many faults there are meanwhile.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

Address = tuple[str, int]


class Phase(Enum):
    OVER = "over"
    MEETING = "meeting"
    JOINING = "joining"
    RUNNING = "running"


class LockstepGroup:
    """Used by one thread.

    Args:
        replica, num_replicas: this core is the one of `replica`.
        send: sends a message to the core of a replica. If there is no link to it, the message is dropped.

    Attributes:
        epoch: the number of the epoch, or of the one that this core wants.
        reason: why the last epoch is over.
        is_closing: whether the engine is being closed, so no core need begin again by itself.
    """

    def __init__(self, replica: int, num_replicas: int, send: Callable[[int, object], None]) -> None:
        self.phase = Phase.OVER
        self.epoch = 0
        self.reason = "it has not begun"
        self.is_closing = False
        self._send = send
        self._replica = replica
        self._peers = [each for each in range(num_replicas) if each != replica]
        self._linked: set[int] = set()
        self._ready: dict[int, tuple[int, list[Address]]] = {}  # what each core wants, with the addresses of its ranks
        self._own_addresses: list[Address] = []
        self._announced = 0, 0  # the last step that a core has announced: epoch and number

    @property
    def target(self) -> int:
        """The number of the last step of this epoch that some core has submitted with rows. All cores must submit it."""
        epoch, number = self._announced
        return number if epoch == self.epoch else 0

    @property
    def missing(self) -> list[int]:
        """The replicas that do not want this epoch yet."""
        return [peer for peer in self._peers if self._ready.get(peer, (0, []))[0] != self.epoch]

    @property
    def can_join(self) -> bool:
        return self.phase is Phase.MEETING and not self.missing

    # -- what this core does ---------------------------------------------------------------------------------------------

    def begin(self, addresses: Sequence[Address]) -> None:
        """The ranks of this core compute alone, and listen at these addresses. Want the next epoch."""
        assert self.phase is Phase.OVER, self.phase
        self._own_addresses = list(addresses)
        self.epoch = max(self.epoch + 1, *(epoch for epoch, _ in self._ready.values()), 0)
        self.phase = Phase.MEETING
        for peer in self._peers:
            self._say_ready(peer)

    def join(self) -> list[Address]:
        """All cores want this epoch. Returns where the ranks of all replicas listen, in the order of the replicas."""
        assert self.can_join
        self.phase = Phase.JOINING
        found = {peer: addresses for peer, (_, addresses) in self._ready.items()} | {self._replica: self._own_addresses}
        return [address for replica in sorted(found) for address in found[replica]]

    def run(self) -> None:
        """The ranks of this core are connected to all others."""
        assert self.phase is Phase.JOINING, self.phase
        self.phase = Phase.RUNNING

    def announce(self, number: int) -> None:
        """This core submits the step with this number, with rows."""
        assert self.phase is Phase.RUNNING, self.phase
        if number <= self.target:
            return  # all cores know of it
        self._announced = self.epoch, number
        for peer in self._peers:
            self._send(peer, {"step": [self.epoch, number]})

    def leave(self, reason: str) -> None:
        """This core has left the epoch, because of a fault. Idempotent."""
        if self.phase in (Phase.JOINING, Phase.RUNNING):
            for peer in self._peers:
                self._send(peer, {"over": self.epoch})
        self._end(reason)

    def say_goodbye(self) -> None:
        """This core ends."""
        for peer in self._peers:
            self._send(peer, {"bye": self.epoch})

    def _end(self, reason: str) -> None:
        self.phase = Phase.OVER
        self.reason = reason

    def _say_ready(self, peer: int) -> None:
        self._send(peer, {"ready": self.epoch, "addresses": self._own_addresses})

    # -- what others do --------------------------------------------------------------------------------------------------

    def link_came(self, peer: int) -> None:
        """A core, perhaps a new one, can be reached."""
        self._linked.add(peer)
        self.is_closing = False
        if self.phase is Phase.MEETING:
            self._say_ready(peer)

    def link_lost(self, peer: int) -> None:
        """A core has ended, or its link is broken."""
        self._linked.discard(peer)
        self._ready.pop(peer, None)
        if self.phase in (Phase.JOINING, Phase.RUNNING):
            self._end(f"the engine core of replica {peer} was lost")

    def take(self, peer: int, message: Any) -> None:  # Any: JSON
        """Take a message of another core."""
        if peer not in self._linked:
            return
        match message:
            case {"step": [int(epoch), int(number)]}:
                self._announced = max(self._announced, (epoch, number))
            case {"over": int(epoch)}:
                if epoch == self.epoch and self.phase in (Phase.JOINING, Phase.RUNNING):
                    self._end(f"replica {peer} has left epoch {epoch} of the group")
            case {"bye": int()}:
                self.is_closing = True
            case {"ready": int(epoch), "addresses": list(addresses)}:
                self._ready[peer] = epoch, [(host, port) for host, port in addresses]
                self._follow(peer, epoch)

    def _follow(self, peer: int, epoch: int) -> None:
        """Want the epoch that another core wants, if it is a later one."""
        if epoch <= self.epoch:
            return
        if self.phase is Phase.MEETING:
            self.epoch = epoch
            for each in self._peers:
                self._say_ready(each)
        elif self.phase is not Phase.OVER:
            self._end(f"replica {peer} wants epoch {epoch} of the group")
