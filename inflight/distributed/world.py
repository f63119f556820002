"""`World`: one rank's connections to the other ranks, which are threads of the same process or other processes."""

from abc import ABC, abstractmethod

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.collectives import Collectives
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError


class World(ABC):
    """Owns the groups and channels that it returns. All ranks must ask for the same groups and channels, in the same order.

    A world lives for one epoch. After a fault it is closed, and the ranks make new worlds, in which they meet again.

    A group has a name. A rank has two groups with the same ranks, "model" and "link". Each group is used by its own thread, so
    neither thread waits for the other.
    """

    def __init__(self, layout: RankLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.tp_rank, self.pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)

    def tensor_parallel_group(self, name: str, into: TensorParallelGroup | None = None) -> TensorParallelGroup:
        """Returns the group of this rank's stage. Waits for the other ranks of the stage.

        Args:
            into: this rank's group of the same name, from the world of an older epoch. This group gets the collectives of this
                world and is returned, so that the layers that hold the group can compute again. No thread may use the group
                meanwhile. If `into` is None, the returned group is new.
        """
        size = self.layout.tensor_parallel_size
        group = into or TensorParallelGroup(size, self.tp_rank)
        if size > 1:
            group.connect(self.collectives(name))
        return group

    @abstractmethod
    def collectives(self, name: str) -> Collectives:
        """Returns the collectives of the stage's group `name`. Called only if a stage has several ranks. Waits for all ranks of
        the stage."""

    @abstractmethod
    def channel(self, peer: int, name: str) -> Channel:
        """Returns a channel to the global rank `peer`. Waits until the peer makes the same call with this rank as its peer."""

    def device_channel(self, peer: int, name: str) -> Channel:
        """As `channel`, but between the GPUs of the two ranks.

        Raises:
            ConfigError: the ranks are threads, which share one GPU.
        """
        raise ConfigError("ranks that are threads of one process share its GPU: use distributed_executor_backend='mp'")

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for other ranks in a collective. False if this is not known. Any thread may call it."""
        return False

    @abstractmethod
    def close(self, reason: str) -> None:
        """Leave the groups and channels. If this rank waits for other ranks, or other ranks wait for this one, the wait fails
        with an error, now and later. This includes waits for groups and channels that are being made. On GPUs waits end
        without an error, and all later results are garbage.

        Idempotent, from any thread. If the ranks are threads of one process, the errors contain `reason`.
        """


class LoneWorld(World):
    """The world of an engine with one rank."""

    def __init__(self) -> None:
        super().__init__(RankLayout(1, 1), 0)

    def collectives(self, name: str) -> Collectives:
        raise AssertionError("a group of one rank needs no collectives")

    def channel(self, peer: int, name: str) -> Channel:
        raise AssertionError(f"there is no rank {peer}")

    def close(self, reason: str) -> None:
        """Do nothing: no other rank waits."""
