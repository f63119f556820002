"""NCCL: collectives and channels between GPUs, on the stream that is current, so that a CUDA graph can record them.

Each group and each channel has a communicator of its own, set up when it is made: nothing is connected later, during a
capture. Torch's own streams, and the events that order them, are left out (`asyncOp = False`): a collective is one kernel on
the caller's stream, and no host waits for it. The price is that an error of a peer is not seen here: kernels wait on the
device until `Communicator.close`, and what they leave then is garbage, so whoever closes must not answer from it.

The watchdog of torch stays: a collective outside of a graph that is not done within the time limit ends the process.
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

CHANNEL_CTAS = 8  # multiprocessors that a transfer may take, also while it waits: of 132 on an H200. Not measured


class Communicator(GroupHandle):
    """The only reference to a backend of NCCL. All of its ranks make it at once."""

    def run(self, collective: str, *arguments: Any) -> None:
        """Launch it on the current stream, and return. The result is there for what comes behind on the stream.

        Raises:
            ConnectionError: this rank has left the group.
        """
        arguments[-1].asyncOp = False
        getattr(self.backend, collective)(*arguments)

    def close(self) -> None:
        """Have the kernels of this rank end, and return. Idempotent, from any thread.

        NCCL tells its kernels at once, but comes back only when no CUDA graph that holds one exists any more, and when the
        kernels of all communicators on the device have ended. So each is aborted in a thread of its own, and nobody waits.
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
    """Meet the others over `store` and set up all that collectives on `device` need.

    Raises:
        RuntimeError: from torch; they did not come, or cannot be reached.
    """
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for GPUs have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    communicator = Communicator(ProcessGroupNCCL(store, rank, size, options))
    group, x = TorchGroup(size, rank, communicator), torch.zeros(1, device=device)
    for collective in (group.all_reduce, group.all_gather, group.broadcast):
        collective(x)  # NCCL connects an algorithm when it is first used
    torch.cuda.synchronize(device)
    return communicator


class NcclChannel(Channel):
    """A broadcast in a group of two is a send. Torch's own send would go through a stream and a communicator of its choice.

    Args:
        rank: of this end in `communicator`, 0 or 1.
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
