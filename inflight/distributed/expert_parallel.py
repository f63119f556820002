"""`ExpertParallelGroup`: the ranks that divide the experts of a layer among them, whole experts instead of parts of all.

A rank computes its experts for the rows of all ranks. The results of a row are added in the order of the row's choices, in
float32, wherever its experts are. So the sum is the same bit for bit for any number of ranks.

Ranks on one machine exchange rows through shared memory (`SharedRows`), by one call of the C++ kernels. If they cannot, or with
the backend "allgather_reducescatter", they exchange rows by the collectives of the group (`sum_of_results`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from inflight.config.engine import EngineConfig
from inflight.config.expert_parallel import SHARED_MEMORY, ExpertRoom, expert_room, experts_of
from inflight.config.experts import MoeSpec
from inflight.distributed.collectives import Collectives
from inflight.distributed.shared_collectives import Offer, SharedCollectives, make_memory, open_memory
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.functions import ExpertExchange
from inflight.kernels.expert_choice import add_results, write_results

_HEADER_BYTES = 4096
_ALIGNMENT = 4096
_MOST_BYTES = 256 << 20  # of the results that are exchanged at once; memory is used only as rows need it
_ROWS_AT_ONCE = 256  # by collectives
# What a rank adds for the experts of others: unlike 0, it leaves even a sum of -0 as it is.
_NOTHING = -0.0


class ExpertParallelGroup:
    """Layers get the group as an argument and keep it, as they keep the `TensorParallelGroup`. The group lives as long as the
    model, its collectives for one epoch.

    Args:
        tp: the tensor-parallel group of this rank's stage. Its ranks all have the same rows.
        room: the largest sizes of the layers of the model.
        num_places: places for copies of experts in each layer, of all ranks together.
        num_replicas, replica: the experts are divided among the ranks of so many replicas, and this rank is in `replica`.
        shares_memory: False: the backend is "allgather_reducescatter".
    """

    def __init__(
        self,
        tp: TensorParallelGroup,
        room: ExpertRoom,
        *,
        num_replicas: int = 1,
        replica: int = 0,
        num_places: int = 0,
        shares_memory: bool = True,
    ) -> None:
        self.size, self.rank, self.tp = num_replicas * tp.size, replica * tp.size + tp.rank, tp
        self.rows: SharedRows | None = None  # None: rows are exchanged by collectives
        self._room, self._shares_memory = room, shares_memory
        self.num_places = num_places
        self._num_replicas, self._replica = num_replicas, replica
        self.collectives: Collectives | None = None

    def seen_by(self, rank: int, size: int) -> ExpertParallelGroup:
        """What a rank of a group of `size` ranks would hold. Such a group is never connected."""
        other = ExpertParallelGroup(self.tp, self._room, num_places=self.num_places, shares_memory=False)
        other.rank, other.size = rank, size
        return other

    def local_experts(self, num_experts: int) -> range:
        """The experts that this rank has."""
        return experts_of(num_experts, self.rank, self.size)

    @property
    def num_own_places(self) -> int:
        """Places for copies of experts in each layer, on this rank."""
        return len(experts_of(self.num_places, self.rank, self.size)) if self.size > 1 else 0

    @property
    def is_together(self) -> bool:
        """Whether the ranks of several replicas compute together now."""
        return self._num_replicas > 1

    def connect(self, collectives: Collectives | None) -> None:
        """Use `collectives` from now on; with one replica these are the ones of `tp`. All ranks must call this, while no
        thread uses the group."""
        assert collectives is not None and (collectives.size, collectives.rank) == (self.size, self.rank)
        self._use(collectives)

    def _use(self, collectives: Collectives) -> None:
        self.rows, self.collectives = None, collectives
        if self._shares_memory and isinstance(collectives, SharedCollectives):
            self.rows = share_rows(collectives, self._room, self._num_replicas)

    def sum_of_results(
        self, hidden: Tensor, choices: Tensor, num_experts: int, compute: Callable[[int, Tensor], Tensor | None]
    ) -> Tensor:
        """The sum of weight * result over the experts of each token, computed by all ranks together.

        Args:
            hidden, choices: as in `compute_experts`, the same on the ranks of a replica. Replicas may have different numbers of
                tokens, also none.
            num_experts: the choices with this index or a higher one are parts of the shared expert.
            compute: called with an expert and some rows; returns None if this rank does not have the expert.

        Returns:
            float32 [num_tokens, hidden_size], the same on the ranks of a replica.
        """
        assert self.collectives is not None, "several ranks need a group that can communicate"
        sums = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        for first in range(0, self._most_rows(len(hidden)), _ROWS_AT_ONCE):
            rows, chosen = hidden[first : first + _ROWS_AT_ONCE], choices[first : first + _ROWS_AT_ONCE]
            count, own_first = len(rows), 0
            if self._num_replicas > 1:
                own_first = self._replica * _ROWS_AT_ONCE
                rows, chosen = self._gather(rows, chosen, num_experts)
            shape = *chosen.shape[:2], hidden.shape[1]
            results = torch.full(shape, _NOTHING, dtype=torch.float32, device=hidden.device)
            write_results(rows, chosen, compute, results)
            results = self.collectives.all_reduce(results)
            sums[first : first + count] = add_results(results[own_first : own_first + count])
        return sums

    def _most_rows(self, num_rows: int) -> int:
        """The number of rows of the replica with the most."""
        if self._num_replicas == 1:
            return num_rows
        assert self.collectives is not None
        return int(self.collectives.all_gather(torch.tensor([num_rows], dtype=torch.int64, device="cpu")).max())

    def _gather(self, rows: Tensor, choices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """The rows and choices of all replicas. Each has `_ROWS_AT_ONCE` places; a choice of -1 is none. Parts of the shared
        expert are chosen for the rows of this replica only."""
        assert self.collectives is not None
        padded = rows.new_zeros((_ROWS_AT_ONCE, rows.shape[1]))
        chosen = choices.new_full((_ROWS_AT_ONCE, *choices.shape[1:]), -1)
        padded[: len(rows)], chosen[: len(rows)] = rows, choices
        # the ranks of a replica give the same rows, of which one copy is used
        of_replica = slice(None, None, self.tp.size)
        padded = self.collectives.all_gather(padded[None], 0)[of_replica].flatten(0, 1)
        everyone = self.collectives.all_gather(chosen[None], 0)[of_replica]
        for replica, its_choices in enumerate(everyone):
            if replica != self._replica:
                its_choices[..., 0].masked_fill_(its_choices[..., 0] >= num_experts, -1)
        return padded, everyone.flatten(0, 1)


def join_experts(config: EngineConfig, tp: TensorParallelGroup) -> ExpertParallelGroup | None:
    """The connected group of this rank's stage; None if each rank has a part of every expert."""
    backend = config.parallel.all2all_backend
    if backend is None:
        return None
    room = expert_room(config.model.architecture, tp.size)
    group = ExpertParallelGroup(tp, room, shares_memory=backend == SHARED_MEMORY)
    group.connect(tp.collectives)
    return group


@runtime_checkable
class DividesExperts(Protocol):
    """A layer that computes experts together with other ranks.

    Attributes:
        kernel: what computes the experts of this rank; None: not the C++ kernels.
    """

    ep: ExpertParallelGroup | None
    kernel: CpuExperts | None
    spec: MoeSpec

    def compute_for_others(self) -> None:
        """In a step in which only other replicas have rows: compute this rank's experts for them."""


class SharedRows:
    """The memory through which the ranks exchange rows (kernels/cpu/expert_exchange.cpp). Keeps it mapped.

    `exchange`: what the kernel gets. `run`: makes a call that communicates with the group (`SharedCollectives.run`).
    """

    def __init__(self, collectives: SharedCollectives, memory: mmap.mmap, room: ExpertRoom, num_replicas: int) -> None:
        num_words = num_replicas + collectives.size  # numbers of rows, and what ranks are ready for
        assert 8 * num_words <= _HEADER_BYTES, f"{collectives.size} ranks"
        self.run = collectives.run
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        places = _Places(room, num_replicas)
        replica, tp_rank = divmod(collectives.rank, collectives.size // num_replicas)
        self.exchange = ExpertExchange(
            group=collectives.pointer,
            memory=ctypes.addressof(self._memory),
            chunk_rows=places.chunk_rows,
            results_at=places.results,
            sums_at=places.sums,
            choices_at=places.choices,
            inputs_at=places.inputs,
            num_replicas=num_replicas,
            replica=replica,
            tp_size=collectives.size // num_replicas,
            tp_rank=tp_rank,
        )


class _Places:
    """Where the parts of the memory begin, in bytes, and how many bytes it has."""

    def __init__(self, room: ExpertRoom, num_replicas: int) -> None:
        result_bytes = room.choices_per_row * room.hidden_size * 4
        self.chunk_rows = max(1, _MOST_BYTES // (result_bytes * num_replicas))
        num_rows = self.chunk_rows * num_replicas
        sizes = (result_bytes, room.hidden_size * 4, room.choices_per_row * 8, room.hidden_size * 4)
        starts = [_HEADER_BYTES]
        for size in sizes:
            starts.append(starts[-1] + math.ceil(num_rows * size / _ALIGNMENT) * _ALIGNMENT)
        self.results, self.sums, self.choices, self.inputs, self.num_bytes = starts


def share_rows(collectives: SharedCollectives, room: ExpertRoom, num_replicas: int = 1) -> SharedRows | None:
    """Makes the memory of a group. Every rank must call this, and all get memory, or none does.

    Raises:
        OSError: from `collectives`.
    """
    num_bytes = _Places(room, num_replicas).num_bytes
    offered = Offer(os.getpid(), -1, secrets.token_bytes(32))
    try:
        if collectives.rank == 0:
            offered = offered._replace(memory_fd=make_memory(num_bytes, offered.mark))
        record = torch.frombuffer(bytearray(offered.pack()), dtype=torch.uint8)
        offer = Offer.unpack(bytes(collectives.broadcast(record).tolist()))
        try:
            memory = open_memory(offer, num_bytes)
        except OSError:
            memory = None
        is_open = torch.tensor([memory is not None], dtype=torch.uint8, device="cpu")
        can_all = bool(collectives.all_gather(is_open, 0).all())
    finally:
        if offered.memory_fd >= 0:
            os.close(offered.memory_fd)  # the memory lives as long as a rank has mapped it
    return SharedRows(collectives, memory, room, num_replicas) if can_all and memory is not None else None
