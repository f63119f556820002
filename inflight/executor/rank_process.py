"""`WorkerProcess`: the process of one rank."""

import os

from inflight.config.ranks import RankLayout
from inflight.processes.child_process import ChildProcess

SPARE_TITLE = "inflight: worker spare"
WAITING_TITLE = "inflight: spare engine worker"  # a rank of an engine core that waits


def worker_title(layout: RankLayout, rank: int) -> str:
    return f"inflight: worker tp{layout.tp_rank(rank)} pp{layout.pp_rank(rank)}"


class WorkerProcess(ChildProcess):
    """The process of one rank's worker.

    Args:
        title: the name that `ps` shows, see `worker_title`.
        stream_fd: the descriptor of the worker's byte stream.
        is_one_node: whether all ranks are on this machine. Then NCCL uses only the loopback interface, unless the user has
            chosen an interface (NCCL_SOCKET_IFNAME).
    """

    def __init__(self, title: str, stream_fd: int, *, is_one_node: bool = False) -> None:
        super().__init__(
            title,
            "inflight.executor.worker_main",
            [stream_fd],
            variables={"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "=lo")} if is_one_node else None,
        )
