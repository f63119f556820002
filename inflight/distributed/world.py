"""`World`: one rank's connections to the other ranks, which are threads of the same process or other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError


class World(ABC):
    """Owns the groups and channels that it returns. All ranks must ask for the same groups and channels, in the same order.

    A group has a name. Two threads of a rank use two groups ("model" and "link"), so that neither waits for the other.
    """

    def __init__(self, layout: RankLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.tp_rank, self.pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)

    @abstractmethod
    def tensor_parallel_group(self, name: str) -> TensorParallelGroup:
        """Returns the group of this rank's stage. Waits for the other ranks of the stage."""

    @abstractmethod
    def channel(self, peer: int, name: str) -> Channel:
        """A channel to the global rank `peer`, which must make the same call with this rank as `peer`. Waits for the peer."""

    def device_channel(self, peer: int, name: str) -> Channel:
        """As `channel`, between the two ranks' GPUs.

        Raises:
            ConfigError: the ranks are threads, and have no GPUs of their own.
        """
        raise ConfigError("ranks that are threads of one process share its GPU: use distributed_executor_backend='mp'")

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for others in a collective; False if not known. Any thread may call it."""
        return False

    @abstractmethod
    def close(self, reason: str) -> None:
        """Leave the groups and channels. Waits of this rank for others, and of others for this rank, end with an error, now
        and later. On GPUs the waits end without an error, and all later results are garbage.

        Idempotent, from any thread. The errors of ranks in the same process contain `reason`.
        """


class LoneWorld(World):
    """The world of an engine with one rank."""

    def __init__(self) -> None:
        super().__init__(RankLayout(1, 1), 0)

    def tensor_parallel_group(self, name: str) -> TensorParallelGroup:
        return TensorParallelGroup()

    def channel(self, peer: int, name: str) -> Channel:
        raise AssertionError(f"there is no rank {peer}")

    def close(self, reason: str) -> None:
        """Do nothing: no other rank waits."""
