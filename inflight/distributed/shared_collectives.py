"""`SharedCollectives`: collectives of tensors on CPUs, between processes of one machine, by the C++ kernels.

The ranks share memory. `kernels/cpu/collectives.cpp` says how they use it. A rank that waits first spins, then sleeps. The
peer's pidfd (a descriptor of its process) tells a rank that the peer has died.

The memory has no name, so nothing is left when all ranks are killed. Rank 0 makes the memory, and the others open it by the id
of rank 0's process and the number of the descriptor. `share_memory` returns None on all ranks if this is not possible:
the ranks have different IP addresses, a rank cannot open the memory of rank 0 (they are on several machines or in several
containers), rank 0 could not make the memory, or a rank has no kernels.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inflight.distributed.collectives import Collectives, sum_in_rank_order
from inflight.distributed.exchange import Exchange
from inflight.errors import LostPeerError, SilentPeerError
from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, RankGroup

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 17
_SUMMED = {**DTYPES, torch.float16: 3}  # `DType` of kernels.h
_LEFT, _DEAD, _SILENT = 1, 2, 3  # `EndOfGroup` of kernels.h
_MARK_BYTES = 32
_OFFER = struct.Struct(f"=qi{_MARK_BYTES}s")


class Offer(NamedTuple):
    """What each rank tells the others before they share memory. Only the offer of rank 0 names memory."""

    process_id: int
    memory_fd: int  # -1: no memory
    mark: bytes  # random, the first bytes of the memory

    def pack(self) -> bytes:
        return _OFFER.pack(*self)

    @staticmethod
    def unpack(record: bytes) -> "Offer":
        return Offer(*_OFFER.unpack(record))


class SharedCollectives(Collectives):
    """A sum is computed in rank order, in float32, and rounded once. Every rank computes it.

    Args:
        memory: the memory that the ranks share.
        pidfds: a pidfd of each rank's process. This object owns them.
        ranks: the global ranks of the group.
        timeout_seconds: the longest wait for a peer.

    Attributes:
        pointer: the group, as calls of the library get it.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        memory: mmap.mmap,
        pidfds: Sequence[int],
        ranks: Sequence[int],
        rank: int,
        timeout_seconds: float,
    ) -> None:
        size = len(ranks)
        num_bytes = kernels.inflight_group_memory_bytes(size, PIECE_BYTES)
        fits = 0 <= rank < size == len(pidfds) and 0 < num_bytes <= len(memory)
        needed = f"{size} ranks need a descriptor each, and {num_bytes} shared bytes (0: they are too many)"
        require(fits, needed, rank, pidfds, len(memory))
        self.size, self.rank = size, rank
        self._ranks = ranks
        self._kernels = kernels
        self._timeout = timeout_seconds
        self._pidfds = (ctypes.c_int32 * size)(*pidfds)
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)  # keeps `memory` mapped
        self._group = RankGroup(
            memory=ctypes.addressof(self._memory),
            pidfds=self._pidfds,
            piece_bytes=PIECE_BYTES,
            timeout_ns=int(timeout_seconds * 1e9),
            size=size,
            rank=rank,
        )
        self.pointer = ctypes.pointer(self._group)
        self._computing = threading.Lock()
        self._is_closed = False

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in _SUMMED:
            return sum_in_rank_order(self.all_gather(x[None], dim=0).unbind())
        x = x.contiguous()
        self._collect(self._kernels.inflight_all_reduce, x.data_ptr(), x.numel(), _SUMMED[x.dtype])
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        dim %= x.dim()
        num_rows = x.shape[:dim].numel()
        row_bytes = x.shape[dim:].numel() * x.itemsize
        before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        gathered = x.new_empty((*before, self.size * length, *after))
        self._collect(self._kernels.inflight_all_gather, x.data_ptr(), gathered.data_ptr(), num_rows, row_bytes)
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._collect(self._kernels.inflight_broadcast, x.data_ptr(), x.nbytes)
        return x

    @property
    def is_waiting(self) -> bool:
        return bool(self._group.is_waiting)

    def close(self) -> None:
        if self._is_closed:
            return
        self._kernels.inflight_leave_group(self.pointer)  # ends the collective that another thread may be in
        with self._computing:
            if not self._is_closed:
                self._is_closed = True
                for pidfd in self._pidfds:
                    os.close(pidfd)

    def _collect(self, collective: Any, *arguments: int) -> None:  # Any: a function of the library
        self.run(partial(collective, self.pointer, *arguments))

    def run(self, call: Callable[[], int]) -> None:
        """Runs a call of the library that communicates with this group, perhaps several times. The call returns 0 or the status
        of the collective that has failed."""
        with self._computing:
            if self._is_closed:
                raise ConnectionError("this rank has stopped its communication")
            status = call()
        if status:
            raise self._error(status & 0xFF, status >> 8)

    def _error(self, kind: int, index: int) -> OSError:
        rank = self._ranks[index]
        if kind == _SILENT:
            return SilentPeerError(f"rank {rank} was silent for {self._timeout:g} s", rank)
        if kind == _DEAD:
            return LostPeerError(f"rank {rank} has died", rank)
        assert kind == _LEFT, kind
        if index == self.rank:
            return ConnectionError("this rank has stopped its communication")
        return LostPeerError(f"rank {rank} has left the group", rank)


def share_memory(exchange: Exchange, kernels: ctypes.CDLL | None) -> SharedCollectives | None:
    """Returns collectives for the ranks of `exchange`, or None if they cannot share memory or a rank has no kernels. Every rank
    must call this, and all ranks get the same answer. `exchange` must stay open until all ranks have the answer.

    Raises:
        OSError: from `exchange`.
    """
    num_bytes: int = 0 if kernels is None else kernels.inflight_group_memory_bytes(exchange.size, PIECE_BYTES)
    offered = Offer(os.getpid(), -1, secrets.token_bytes(_MARK_BYTES))
    joined: SharedCollectives | None = None
    try:
        if num_bytes and exchange.rank == 0:
            offered = offered._replace(memory_fd=make_memory(num_bytes, offered.mark))
        offers = [Offer.unpack(record) for record in exchange.swap_records(offered.pack())]
        if kernels is not None and num_bytes and exchange.is_one_host:
            try:
                memory = open_memory(offers[0], num_bytes)
                pidfds = _open_processes([offer.process_id for offer in offers])
                joined = SharedCollectives(
                    kernels, memory, pidfds, exchange.ranks, exchange.rank, exchange.timeout_seconds
                )
            except OSError as error:
                logger.info("the ranks of a group cannot share memory: %s", error)
        can_all = all(record == b"\1" for record in exchange.swap_records(bytes([joined is not None])))
    except BaseException:
        if joined is not None:
            joined.close()
        raise
    finally:
        if offered.memory_fd >= 0:
            os.close(offered.memory_fd)  # the memory lives as long as a rank has mapped it
    if joined is not None and not can_all:
        joined.close()
    return joined if can_all else None


def make_memory(num_bytes: int, mark: bytes) -> int:
    """Returns a descriptor of new memory that begins with `mark`, or -1 if the operating system refuses."""
    try:
        memory_fd = os.memfd_create("inflight-collectives", os.MFD_CLOEXEC)
    except OSError as error:
        logger.info("no memory for the ranks of a group can be made: %s", error)
        return -1
    os.truncate(memory_fd, num_bytes)
    os.pwrite(memory_fd, mark, 0)
    return memory_fd


def open_memory(offer: Offer, num_bytes: int) -> mmap.mmap:
    """
    Raises:
        OSError: there is no such process or descriptor here, or its memory is not the group's.
    """
    opened = os.open(f"/proc/{offer.process_id}/fd/{offer.memory_fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != num_bytes or os.pread(opened, len(offer.mark), 0) != offer.mark:
            raise OSError(f"descriptor {offer.memory_fd} of process {offer.process_id} is not the group's memory")
        return mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)


def _open_processes(process_ids: Sequence[int]) -> list[int]:
    with contextlib.ExitStack() as until_all_are_open:
        pidfds = []
        for process_id in process_ids:
            pidfds.append(os.pidfd_open(process_id))
            until_all_are_open.callback(os.close, pidfds[-1])
        until_all_are_open.pop_all()
        return pidfds
