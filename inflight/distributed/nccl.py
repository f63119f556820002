"""NCCL: collectives and channels between GPUs, on the current stream, so that a CUDA graph can record them.

Each group and each channel has its own communicator. All connections of a communicator are made when it is made, because none
can be made during a graph capture. Torch's own streams and events are not used (`asyncOp = False`): a collective is one kernel
on the caller's stream, and the host does not wait for this kernel. Therefore this rank gets no error when a peer fails. Its
kernels wait on the device until `Communicator.close`, and then their results are garbage that nobody may use.

Torch's watchdog stays active: if a collective outside of a graph is not done within the time limit, it ends the process.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, Store

from inflight.distributed.channel import Channel
from inflight.distributed.torch_group import GroupHandle, TorchGroup

logger = logging.getLogger(__name__)

CHANNEL_CTAS = 8  # how many multiprocessors (an H200 has 132) a transfer may occupy, also while it waits; not tuned


class Communicator(GroupHandle):
    """Holds the only reference to an NCCL backend. All ranks of a group must make their communicators at the same time."""

    def run(self, collective: str, *arguments: Any) -> None:
        """Launch the collective on the current stream, and return. Later work on the stream can use the result.

        Raises:
            ConnectionError: this rank has left the group.
        """
        arguments[-1].asyncOp = False
        getattr(self.backend, collective)(*arguments)

    def close(self) -> None:
        """End the communicator's kernels on this rank. Returns at once. Idempotent, from any thread.

        NCCL's abort stops the kernels at once. But the abort returns only when all CUDA graphs with a kernel of this
        communicator have been deleted, and the kernels of all communicators on the device have ended. So each communicator is
        aborted in its own thread.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            threading.Thread(target=_abort, args=(backend,), name="inflight-abort", daemon=True).start()


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        logger.warning("a communicator could not be aborted: %s", error)


def connect(
    store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float, max_ctas: int | None = None
) -> Communicator:
    """Meet the other ranks over `store`, and make all connections that collectives on `device` need.

    Raises:
        RuntimeError: from torch, if the other ranks did not come in time, or cannot be reached.
    """
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds of torch for GPUs have this class

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    communicator = Communicator(ProcessGroupNCCL(store, rank, size, options))
    group, x = TorchGroup(size, rank, communicator), torch.zeros(1, device=device)
    for collective in (group.all_reduce, group.all_gather, group.broadcast):
        collective(x)  # NCCL makes the connections of an algorithm when the algorithm is first used
    torch.cuda.synchronize(device)
    return communicator


class NcclChannel(Channel):
    """Sends by a broadcast in a group of two, because torch's own `send` uses a stream and a communicator of its choice.

    Args:
        rank: the rank of this end in `communicator`, 0 or 1.
    """

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self._communicator, self._rank = communicator, rank

    def send(self, tensor: Tensor) -> None:
        self._broadcast(tensor, root=self._rank)

    def receive(self, tensor: Tensor) -> None:
        self._broadcast(tensor, root=1 - self._rank)

    def close(self) -> None:
        self._communicator.close()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._communicator.run("broadcast", [tensor], options)
