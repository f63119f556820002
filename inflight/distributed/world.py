"""`World`: one rank's connections to the others, which are threads of its process or other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError


class World(ABC):
    """Owns the groups and channels that it hands out. All ranks ask for the same ones, in the same order.

    Groups are told apart by name, so that what one thread does on "model" never waits for another thread's turn on "link".
    """

    def __init__(self, layout: RankLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.tp_rank, self.pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)

    @abstractmethod
    def tensor_parallel_group(self, name: str) -> TensorParallelGroup:
        """The ranks of this rank's stage. Waits for them."""

    @abstractmethod
    def channel(self, peer: int, name: str) -> Channel:
        """To the global rank `peer`, which asks for the one to this rank. Waits for it."""

    def device_channel(self, peer: int, name: str) -> Channel:
        """As `channel`, between the two ranks' GPUs.

        Raises:
            ConfigError: ranks that are not processes have none of their own.
        """
        raise ConfigError("ranks that are threads of one process share its GPU: use distributed_executor_backend='mp'")

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for others in a collective; False if that is not known. Any thread may call it."""
        return False

    @abstractmethod
    def close(self, reason: str) -> None:
        """Leave: every wait of this rank for another one, and of others for this one, ends with an error, now and later.
        On GPUs nobody sees the error: the waits end, and what is computed from then on is garbage.

        Idempotent, from any thread. `reason` goes into the error of ranks in the same process.
        """


class LoneWorld(World):
    """A rank that has no others."""

    def __init__(self) -> None:
        super().__init__(RankLayout(1, 1), 0)

    def tensor_parallel_group(self, name: str) -> TensorParallelGroup:
        return TensorParallelGroup()

    def channel(self, peer: int, name: str) -> Channel:
        raise AssertionError(f"there is no rank {peer}")

    def close(self, reason: str) -> None:
        """Nobody waits."""
