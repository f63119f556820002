"""`ExpertMover`: brings copies of experts into places of other ranks, in a thread of its own, beside the steps.

All ranks get the same list of moves. The thread goes through it from the first to the last: in a move it sends an expert that
this rank has for good, or receives one, or does nothing. So the two ranks of a move both come to it.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from inflight.distributed.channel import Channel
from inflight.errors import LostPeerError
from inflight.kernels.cpu.expert_balance import BalancedExperts, describe, empty_description
from inflight.thread_priority import lower_priority

logger = logging.getLogger(__name__)

_NICENESS = 10


class Move(NamedTuple):
    """An expert of a layer, which is on the rank `source` for good, is copied to a place of the rank `target`."""

    layer: int
    expert: int
    source: int
    place: int
    target: int


class ExpertMover:
    """
    Args:
        rank: this rank.
        layers: its layers with experts.
        channels: to each other rank. Whoever opened them closes them, which ends the thread.
    """

    def __init__(self, rank: int, layers: Sequence[BalancedExperts], channels: Mapping[int, Channel]) -> None:
        self._rank = rank
        self._layers = layers
        self._channels = channels
        self._jobs = SimpleQueue[tuple[int, Sequence[Move]] | None]()
        self._is_broken = False
        self._done = 0  # the number of the last list that is done
        self.is_awaited = False  # whether `move_now` is under way
        self._thread = threading.Thread(target=self._run, name="inflight-experts", daemon=True)
        self._thread.start()

    @property
    def done(self) -> int:
        """The number of the last list whose copies are all here. Others than this rank may need longer."""
        return self._done

    def move(self, number: int, moves: Sequence[Move]) -> None:
        """Make these moves after the ones that were given before. No rank computes what is in the places, until it is done."""
        self._jobs.put((number, moves))

    def move_now(self, number: int, moves: Sequence[Move]) -> None:
        """As `move`, in the calling thread. Use either one or the other."""
        self.is_awaited = True
        self._make_all(number, moves)
        self.is_awaited = False

    def end(self) -> None:
        """The channels were closed: wait for the end of the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        lower_priority(_NICENESS)
        while (job := self._jobs.get()) is not None:
            self._make_all(*job)

    def _make_all(self, number: int, moves: Sequence[Move]) -> None:
        if self._is_broken:
            return
        try:
            num_missing = sum(not self._make(each) for each in moves)
            if not num_missing:
                self._done = number
        except Exception as error:  # the bytes that come next are not known, so no more can be read
            self._is_broken = True
            is_end = isinstance(error, LostPeerError) or "was closed here" in str(error)
            logger.log(logging.DEBUG if is_end else logging.ERROR, "no more experts are copied: %s", error)

    def _make(self, move: Move) -> bool:
        """Returns whether the copy is here, or this rank gets none."""
        layer = self._layers[move.layer]
        if move.source == self._rank:
            self._send(layer, move)
        elif move.target == self._rank:
            return self._receive(layer, move)
        return True

    def _send(self, layer: BalancedExperts, move: Move) -> None:
        channel = self._channels[move.target]
        for product in layer.products_of(move.expert):
            description, parts = describe(product)
            for each in (description, *parts):
                channel.send(each)

    def _receive(self, layer: BalancedExperts, move: Move) -> bool:
        channel = self._channels[move.source]
        fits = True
        for part in layer.places[move.place].parts:
            description = empty_description()
            channel.receive(description)
            memory, part_fits = part.begin(description)
            for each in memory:
                channel.receive(each)
            fits = fits and part_fits
        if not fits:
            logger.warning(
                "expert %d of rank %d is larger than those of rank %d, so it is not copied",
                move.expert,
                move.source,
                move.target,
            )
        return fits
