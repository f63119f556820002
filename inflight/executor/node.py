"""`run_node`: the program `inflight worker`, for each node but node 0. It starts the node's ranks and waits until they end.

It makes one connection to node 0 for each rank, and passes it to the rank's process. So worker processes run the same
program on all nodes, and never get the cluster's token. If a process dies, or is stopped by a signal, this program makes a new
connection to node 0 and starts a new process with it. Then the executor begins a new epoch with this process (recovery.py).
"""

import logging
import time
from dataclasses import dataclass

from inflight import envs
from inflight.config.ranks import RankLayout, ranks_of_node
from inflight.errors import ConfigError, EngineError, WorkerDiedError
from inflight.executor.rank_process import WorkerProcess, worker_title
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import Hello
from inflight.processes.acceptor import connect
from inflight.processes.child_process import STOPPED_LOOK_SECONDS, stop_processes, wait_for_first_end
from inflight.processes.streams import EXIT_STREAM_ENDED

logger = logging.getLogger(__name__)

MAX_CONNECT_SECONDS = 300.0
REJOIN_SECONDS = 60.0  # how long a new process for a lost rank may try to connect
RETRY_SECONDS = 0.2  # time between two tries; node 0 refuses a rank until it has noticed that the old process is gone
LAST_RANKS_SECONDS = 10.0  # when one rank of the node has been told to end, the others must end within this time


@dataclass(frozen=True, kw_only=True)
class NodeArgs:
    """The arguments of `inflight worker`. All except `node_rank` must be the same as on node 0."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


def run_node(args: NodeArgs, *, max_connect_seconds: float = MAX_CONNECT_SECONDS) -> None:
    """Run this node's ranks until the executor of node 0 ends them. When the call returns, all its processes have ended.

    Args:
        max_connect_seconds: how long to wait for node 0 at the start.

    Raises:
        ConfigError: the arguments do not fit together, or node 0 refuses them.
        EngineError: node 0 does not answer.
        WorkerDiedError: a rank of this node ended, and node 0 did not accept a new one.
    """
    if args.node_rank == 0:
        raise ConfigError(
            "node 0 runs the engine itself (LLM(...), inflight generate); start `inflight worker` only on the other nodes"
        )
    node = _Node(args)
    try:
        for rank in node.ranks:
            node.start(rank, max_connect_seconds)
        logger.info("ranks %d to %d of %d run on this node", node.ranks[0], node.ranks[-1], node.world_size)
        while not node.has_ended:
            for rank in node.wait_for_lost():
                node.restart(rank)
        stop_processes(node.processes.values(), LAST_RANKS_SECONDS)
    finally:  # also after an interrupt
        stop_processes(node.processes.values(), 0.0)
        for process in node.processes.values():
            process.close()


class _Node:
    """The processes of this node's ranks."""

    def __init__(self, args: NodeArgs) -> None:
        self._layout = RankLayout(args.tensor_parallel_size, args.pipeline_parallel_size)
        self._args = args
        self._token = envs.cluster_token()
        self.world_size = self._layout.world_size
        self.ranks = ranks_of_node(self.world_size, args.nnodes, args.node_rank)
        self.processes: dict[int, WorkerProcess] = {}

    @property
    def has_ended(self) -> bool:
        """Whether node 0 has told a rank to end."""
        return any(process.exit_code == 0 for process in self.processes.values())

    def start(self, rank: int, max_seconds: float) -> None:
        hello = Hello(schema=schema_digest(), rank=rank, world_size=self.world_size, nnodes=self._args.nnodes)
        address = self._args.master_addr, self._args.master_port
        with connect(address, hello, self._token, max_seconds=max_seconds) as connected:
            self.processes[rank] = WorkerProcess(worker_title(self._layout, rank), connected.fileno())

    def wait_for_lost(self) -> list[int]:
        """Wait until processes have ended, or at most STOPPED_LOOK_SECONDS. Returns the ranks that were lost, and not told to
        end."""
        wait_for_first_end(self.processes.values(), STOPPED_LOOK_SECONDS)
        for process in self.processes.values():
            process.kill_if_stopped()
        return [rank for rank, process in self.processes.items() if process.exit_code not in (None, 0)]

    def restart(self, rank: int) -> None:
        """Start a new process for a lost rank, unless node 0 tells another rank to end meanwhile."""
        old = self.processes[rank]
        end = time.monotonic() + REJOIN_SECONDS
        lost_node_0 = old.exit_code == EXIT_STREAM_ENDED
        reason = "has lost node 0: the engine has died, or the link broke" if lost_node_0 else f"was lost: {old.state}"
        logger.warning("rank %d %s; a new process tries to connect for %g s", rank, reason, REJOIN_SECONDS)
        while not self.has_ended:
            try:
                self.start(rank, 0.0)
                old.close()
                break
            except (ConfigError, EngineError) as error:
                if time.monotonic() + RETRY_SECONDS > end:
                    raise WorkerDiedError(f"rank {rank} {reason}", rank=rank) from error
            time.sleep(RETRY_SECONDS)
