"""NCCL: collectives and channels between GPUs, on the current stream, so that a CUDA graph can record them.

Each group and each channel has its own communicator. All connections of a communicator are made when the communicator is made,
because no connection can be made during a graph capture. Torch's own streams and events are not used (`asyncOp = False`): a
collective is one kernel on the caller's stream, and the host does not wait for this kernel. Therefore this rank gets no error
when a peer fails. The kernels of this rank wait on the device until `Communicator.close`. Then their results are garbage, which
nobody must use.

Torch's watchdog stays active: it ends the process if a collective outside of a graph is not done within the time limit.
"""

import logging
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, Store

from inflight.distributed.channel import Channel
from inflight.distributed.collectives import Collectives

logger = logging.getLogger(__name__)

CHANNEL_CTAS = 8  # how many multiprocessors (an H200 has 132) a transfer may occupy, also while it waits; not tuned


class Communicator:
    """Holds the only reference to an NCCL backend. All ranks of a group must make their communicators at the same time."""

    def __init__(self, backend: Any) -> None:  # Any: torch's stubs leave out the collectives of its backends
        self.backend = backend  # None after `close`

    def run(self, collective: str, *arguments: Any) -> None:
        """Launch the method `collective` of the backend on the current stream, and return. Later work on the stream can use
        the result. The last argument has the method's options.

        Raises:
            ConnectionError: this rank has left the group.
        """
        backend = self.backend
        if backend is None:
            raise ConnectionError("this rank has stopped its communication")
        arguments[-1].asyncOp = False
        getattr(backend, collective)(*arguments)

    def close(self) -> None:
        """End the communicator's kernels on this rank. Returns at once. Idempotent, from any thread.

        NCCL's abort stops the kernels at once. But the abort returns only when all CUDA graphs with a kernel of this
        communicator have been deleted, and the kernels of all communicators on the device have ended. So each communicator is
        aborted in its own thread.
        """
        backend, self.backend = self.backend, None
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
    group = NcclCollectives(size, rank, communicator)
    x = torch.zeros(1, dtype=torch.float32, device=device)
    for collective in (group.all_reduce, group.all_gather, group.broadcast):
        collective(x)  # NCCL makes the connections of an algorithm when the algorithm is first used
    torch.cuda.synchronize(device)
    return communicator


class NcclCollectives(Collectives):
    """All ranks get the same bits, because NCCL computes each sum only once, and sends the result to all ranks. NCCL chooses
    the order of the sum."""

    def __init__(self, size: int, rank: int, communicator: Communicator) -> None:
        self.size, self.rank = size, rank
        self._communicator = communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._communicator.run("allreduce", [x], AllreduceOptions())
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._communicator.run("_allgather_base", gathered, x.contiguous(), AllgatherOptions())
        if dim == 0:
            return gathered
        return torch.cat(gathered.chunk(self.size), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._communicator.run("broadcast", [x], BroadcastOptions())  # from rank 0
        return x

    def close(self) -> None:
        self._communicator.close()


class NcclChannel(Channel):
    """Sends by a broadcast in a group of two, because torch's own `send` uses a stream and a communicator of its choice.

    Args:
        rank: the rank of this end in `communicator`, 0 or 1.
    """

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self._communicator = communicator
        self._rank = rank

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
