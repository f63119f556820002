"""`TorchGroup`: a group of ranks with collectives of torch.distributed (gloo or NCCL). A rank can leave it at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from inflight.distributed.tensor_parallel import TensorParallelGroup


class GroupHandle:
    """Holds the only reference to a gloo backend. When `close` drops this reference, the backend's connections close, and peers
    that wait for this rank get an error.

    Attributes:
        is_waiting: whether this rank waits for other ranks in a collective.
    """

    def __init__(self, backend: Any) -> None:  # Any: torch's stubs leave out the collectives of its backends
        self._backend = backend
        self.is_waiting = False

    @property
    def backend(self) -> Any:
        if self._backend is None:
            raise ConnectionError("this rank has left its groups")
        return self._backend

    def run(self, collective: str, *arguments: Any) -> None:
        """Call the method `collective` of the backend, and wait until it has ended. The last argument has the method's options.

        Raises:
            ConnectionError: this rank or another rank has left the group, or a rank did not answer in time.
        """
        work = getattr(self.backend, collective)(*arguments)
        self.is_waiting = True
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(
                f"a collective failed, because another rank has left or did not answer: {error}"
            ) from error
        finally:
            self.is_waiting = False

    def close(self) -> None:
        self._backend = None


@dataclass(frozen=True)
class TorchGroup(TensorParallelGroup):
    """All ranks get the same bits: gloo and NCCL compute each sum only once, and send the result to all ranks."""

    handle: GroupHandle | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._run("allreduce", [x], AllreduceOptions())
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._run("_allgather_base", gathered, x.contiguous(), AllgatherOptions())
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._run("broadcast", [x], BroadcastOptions())  # from rank 0
        return x

    def _run(self, collective: str, *arguments: Any) -> None:
        assert self.handle is not None
        self.handle.run(collective, *arguments)
