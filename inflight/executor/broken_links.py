"""`BrokenLinks`: decides which ranks are replaced because of links that stay broken. `smallest_cover`: the fewest such ranks.

A link is broken if its two ranks live, and both reach the executor, but one cannot connect to the other. The rank that tried
reports this. A link that comes back costs no rank: for LINK_SECONDS the ranks only try to meet again and again. Then the fewest
ranks that touch all broken links are replaced, because a new process has new sockets and may listen at another address.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection

from inflight.executor.meeting import Meeting
from inflight.sockets import REACH_SECONDS

logger = logging.getLogger(__name__)

LINK_SECONDS = 5.0  # a link that is broken for this long costs a rank

Link = tuple[int, int]  # the rank that tried to connect, and the rank that it could not reach
Cost = tuple[int, ...]


class BrokenLinks:
    """The broken links of one recovery.

    Args:
        local_ranks: the ranks on the machine of the executor.

    Attributes:
        replaced: the ranks that were replaced because of broken links. A rank is replaced once: if its new process cannot
            reach the peer either, the network itself is cut.
    """

    def __init__(self, local_ranks: Collection[int]) -> None:
        self.replaced: set[int] = set()
        self._local_ranks = local_ranks
        # when the first meeting failed because of a broken link; None if a rank was new then
        self._since: float | None = None

    def ranks_to_replace(self, meeting: Meeting, *, has_new_ranks: bool) -> set[int]:
        """Call this after each failed meeting. `has_new_ranks`: whether a rank was replaced in this meeting."""
        now = time.monotonic()
        if has_new_ranks:
            self._since = None
        elif meeting.broken_links and self._since is None:
            self._since = now
        if self._since is None or now - self._since < LINK_SECONDS or not meeting.broken_links:
            return set()
        self._since = None
        meeting.wait_for_all_replies(REACH_SECONDS)
        links = meeting.broken_links
        chosen = self._choose(links)
        shown = ", ".join(f"{rank} cannot reach {peer}" for rank, peer in sorted(links))
        new = ", ".join(map(str, sorted(chosen)))
        todo = f"replacing ranks {new}" if chosen else "waiting for the network"
        logger.warning("links between ranks are broken (%s): %s", shown, todo)
        self.replaced |= chosen
        return chosen

    def _choose(self, links: Collection[Link]) -> set[int]:
        """Of covers of the same size, take the ranks that most others cannot reach, because they are the likely cause. Of these
        take local ranks: they start again at once, and perhaps from a spare process."""
        accused = Counter(peer for _, peer in links)

        def cost(rank: int) -> Cost:
            count = len(links) + 1 if rank in self.replaced else 1  # so dear that a rank is never chosen twice
            return count, -accused[rank], rank not in self._local_ranks, rank

        chosen = smallest_cover({link for link in links if not self.replaced.issuperset(link)}, cost)
        # in a later choice the other ends are replaced, but not more ranks than were replaced so far
        if self.replaced and len(chosen) > len(self.replaced):
            return set()
        return chosen


def smallest_cover(links: Collection[Link], cost: Callable[[int], Cost]) -> set[int]:
    """Returns ranks that touch all `links`, such that the sum of their costs is smallest (a minimum vertex cover).

    A cover has either a given rank or all its neighbours. Both are tried for the rank with the most links. So the links between
    two machines (each rank of one with each rank of the other) take as many branches as there are ranks.
    """
    if not links:
        return set()
    counts = Counter(rank for link in links for rank in link)
    most = max(counts, key=lambda rank: (counts[rank], -rank))
    parts = {most}, {rank for link in links if most in link for rank in link} - {most}
    covers = [part | smallest_cover([link for link in links if part.isdisjoint(link)], cost) for part in parts]
    return min(covers, key=lambda cover: tuple(map(sum, zip(*map(cost, cover), strict=True))))
