"""`ExpertBalancer`: gives busy experts copies on other ranks, while steps run (docs/moe.md).

All ranks run the same steps, and the kernels of each rank see the choices of all rows. So all ranks count the same, decide the
same at the same step, and need not talk about it:

    step n              | all ranks decide. Copies that are not wanted any more are not used from this step on
    beside the steps    | new copies come to places that are free (`ExpertMover`), on each rank as fast as it can
    step m, on a rank   | its copies are all here: it writes so in each exchange of rows
    the first step in which all ranks have written so uses the copies, on all ranks (kernels/cpu/expert_exchange.cpp)

If this has not happened by the next decision, the move is given up: all ranks see that, too. When the ranks meet after a fault,
no expert has copies.
"""

import logging
import time
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from inflight.config.eplb import EplbConfig
from inflight.config.expert_parallel import experts_of
from inflight.distributed.channel import Channel
from inflight.distributed.expert_parallel import DividesExperts, ExpertParallelGroup
from inflight.errors import ConfigError
from inflight.interface.expert_counts import ExpertCounts
from inflight.kernels.cpu.expert_balance import EMPTY, BalancedExperts, Homes, Indices
from inflight.worker.expert_balance.mover import ExpertMover, Move
from inflight.worker.expert_balance.placement import place_copies

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """That of one rank. Without `config` it only counts.

    Args:
        mixtures: the layers with experts of this rank.

    Raises:
        ConfigError: there is a `config`, but the C++ kernels do not compute the experts.
    """

    def __init__(self, mixtures: Sequence[DividesExperts], config: EplbConfig | None) -> None:
        self._config = config
        group = mixtures[0].ep
        assert group is not None, "the ranks of several replicas divide the experts"
        self._group = group
        kernels = [each.kernel for each in mixtures if each.kernel is not None]
        if config is not None and len(kernels) < len(mixtures):
            raise ConfigError(
                "enable_eplb=True needs the C++ kernels, which cannot be used here (the warning above says why): leave it out, "
                "or install the kernels"
            )
        homes = _homes(group, mixtures[0].spec.num_experts)
        self._layers = [BalancedExperts(each, homes) for each in kernels]
        self._homes = homes
        self._counts = ExpertCounts(num_ranks=group.size)  # of copies
        self._taken_work = 0, 0
        self._mover: ExpertMover | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_steps = 0
        self._number = 0  # of the last decision for other copies
        self._decided_at = 0.0  # on the clock time.monotonic()
        self._now: Indices = np.full((len(self._layers), len(self._homes.of_place)), EMPTY)
        self._target: Indices | None = None  # the copies that are coming
        self._first_pairs = self._pairs()
        self._pairs_at: dict[int, Indices] = {}  # step at which a window begins -> the pairs before it

    def begin(self, channels: Mapping[int, Channel]) -> None:
        """The ranks of all replicas have met: no expert has copies. Called while no step is computed, on all ranks.

        Args:
            channels: to each other rank; the ones of the last meeting are closed.
        """
        if self._config is None:
            return
        self.end()
        self._reset()
        for layer, copies in zip(self._layers, self._now, strict=True):
            layer.use(copies)
        self._mover = ExpertMover(self._group.rank, self._layers, channels)

    def end(self) -> None:
        """The channels are closed."""
        if self._mover is not None:
            self._mover.end()
            self._mover = None

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits until copies have come."""
        return self._mover is not None and self._mover.is_awaited

    def before_step(self) -> None:
        """Called before each step of all replicas, in the compute thread."""
        config, mover = self._config, self._mover
        if config is None or mover is None or not self._group.is_together:
            return
        if self._target is not None and self._layers[0].is_agreed:
            self._switch(self._target)
        step = self._num_steps
        self._num_steps += 1
        if step > 0 and step % config.step_interval == 0:
            self._decide(config, mover, step)
        if (step + config.window_size) % config.step_interval == 0:
            self._pairs_at[step] = self._pairs()
        if self._target is not None and mover.done == self._number:
            name = self._number << 32 | zlib.crc32(self._target.tobytes())
            for layer, copies in zip(self._layers, self._target, strict=True):
                layer.agree_on(copies, name)

    def take_counts(self) -> ExpertCounts | None:
        """What has happened since the last call; None: experts are not computed by the C++ kernels, which count. Any thread may
        call it."""
        if not self._layers:
            return None
        counts, self._counts = self._counts, ExpertCounts(num_ranks=self._group.size)
        num_blocks, busiest_blocks = self._work()
        counts.num_blocks = num_blocks - self._taken_work[0]
        counts.busiest_blocks = busiest_blocks - self._taken_work[1]
        self._taken_work = num_blocks, busiest_blocks
        return counts

    def _pairs(self) -> Indices:
        """[num_layers, num_experts]: the pairs (row, expert) so far."""
        return np.array([each.pairs for each in self._layers])

    def _work(self) -> tuple[int, int]:
        return sum(each.work[0] for each in self._layers), sum(each.work[1] for each in self._layers)

    def _decide(self, config: EplbConfig, mover: ExpertMover, step: int) -> None:
        if self._target is not None:
            self._give_up(self._target)
        loads = self._pairs() - self._pairs_at.pop(step - config.window_size, self._first_pairs)
        placement = place_copies(loads, self._homes, self._now)
        if config.log_balancedness and self._group.rank == 0:
            self._log_balance(loads, placement.busiest)
        if np.array_equal(placement.copies, self._now):
            return
        kept = np.where(placement.copies == self._now, self._now, EMPTY)
        self._use(kept)
        self._target = placement.copies
        self._number += 1
        self._decided_at = time.monotonic()
        moves = self._moves(placement.copies, kept)
        if config.use_async:
            mover.move(self._number, moves)
        else:
            mover.move_now(self._number, moves)

    def _moves(self, copies: Indices, kept: Indices) -> list[Move]:
        homes = self._homes
        found = []
        for layer, place in np.argwhere(copies != kept).tolist():
            expert = int(copies[layer, place])
            if expert != EMPTY:
                found.append(Move(layer, expert, int(homes.of_expert[expert]), place, int(homes.of_place[place])))
        return found

    def _switch(self, target: Indices) -> None:
        """All ranks have used the target in the last step."""
        num_copies = int(((target != EMPTY) & (target != self._now)).sum())
        self._use(target)
        self._target = None
        self._counts.num_rebalances += 1
        self._counts.num_copies += num_copies
        if self._group.rank == 0:
            seconds = time.monotonic() - self._decided_at
            logger.info("%d copies of experts have come in %.2f s, and are used", num_copies, seconds)

    def _give_up(self, target: Indices) -> None:
        """At least one rank was not ready for the target."""
        self._use(self._now)
        self._target = None
        self._counts.num_given_up += 1
        if self._group.rank == 0:
            logger.warning(
                "%d copies of experts are given up: in %d steps not all of them have come",
                int(((target != EMPTY) & (target != self._now)).sum()),
                self._config.step_interval if self._config is not None else 0,
            )

    def _use(self, copies: Indices) -> None:
        self._now = copies
        for layer, its_copies in zip(self._layers, copies, strict=True):
            layer.use(its_copies)

    def _log_balance(self, loads: Indices, busiest: Indices) -> None:
        mean = loads.sum() / self._group.size
        if mean:
            of_rank = np.array([loads[:, self._homes.of_expert == rank].sum(1) for rank in range(self._group.size)])
            logger.info(
                "balance of the ranks in layers with experts: %.3f without copies, %.3f expected with copies",
                mean / of_rank.max(0).sum(),
                mean / busiest.sum(),
            )


def _homes(group: ExpertParallelGroup, num_experts: int) -> Homes:
    """Where the experts of a layer are, and the places."""
    return Homes(
        group.size,
        group.rank,
        of_expert=_owners(num_experts, group.size),
        of_place=_owners(group.num_places, group.size),
    )


def _owners(count: int, num_ranks: int) -> Indices:
    """The rank of each of so many experts or places."""
    return np.repeat(np.arange(num_ranks), [len(experts_of(count, rank, num_ranks)) for rank in range(num_ranks)])
