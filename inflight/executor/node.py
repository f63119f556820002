"""`run_node`: what `inflight worker` does on every node but node 0: starts the node's ranks and waits for their end.

Each rank's process is given a TCP connection that has been accepted by node 0, so that the program of a worker is the same on
all nodes, and the token is known to no worker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from inflight import envs
from inflight.config.ranks import RankLayout, ranks_of_node
from inflight.errors import ConfigError, WorkerDiedError
from inflight.executor.join import connect
from inflight.executor.process import WorkerProcess, stop_processes, wait_for_first_end, worker_title
from inflight.executor.transport import EXIT_STREAM_ENDED
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import Hello

logger = logging.getLogger(__name__)

MAX_CONNECT_SECONDS = 300.0
LAST_RANKS_SECONDS = 10.0  # from the end of a node's first rank to that of its last


@dataclass(frozen=True, kw_only=True)
class NodeArgs:
    """This node among the others; the sizes are those that node 0 was started with."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


def run_node(args: NodeArgs, *, max_connect_seconds: float = MAX_CONNECT_SECONDS) -> None:
    """Serve until the executor of node 0 ends the ranks. No process outlives the call.

    Raises:
        ConfigError: the arguments do not fit, or node 0 refuses them.
        EngineError: node 0 does not answer.
        WorkerDiedError: a rank of this node ended otherwise than by the executor's word.
    """
    layout = RankLayout(args.tensor_parallel_size, args.pipeline_parallel_size)
    ranks = ranks_of_node(layout.world_size, args.nnodes, args.node_rank)
    if args.node_rank == 0:
        raise ConfigError(
            "node 0 runs the engine itself (LLM(...), inflight generate): `inflight worker` is for the others"
        )
    token = envs.cluster_token()
    processes: list[WorkerProcess] = []
    try:
        for rank in ranks:
            hello = Hello(
                token=token,
                schema=schema_digest(),
                rank=rank,
                world_size=layout.world_size,
                nnodes=args.nnodes,
            )
            with connect((args.master_addr, args.master_port), hello, max_seconds=max_connect_seconds) as connected:
                processes.append(WorkerProcess(worker_title(layout, rank), connected.fileno()))
        logger.info("ranks %d to %d of %d run on this node", ranks[0], ranks[-1], layout.world_size)
        wait_for_first_end(processes)
        stop_processes(processes, LAST_RANKS_SECONDS)
    finally:  # after an interrupt, too
        stop_processes(processes, 0.0)
        for process in processes:
            process.close()
    for rank, process in zip(ranks, processes, strict=True):
        if process.exit_code == EXIT_STREAM_ENDED:
            raise WorkerDiedError(f"rank {rank} has lost node 0: the engine has died, or the link to it", rank=rank)
        if process.exit_code != 0:
            raise WorkerDiedError(f"rank {rank}: {process.state}", rank=rank)
