"""`run_node`: the program `inflight worker`, for each node but node 0. It starts the node's ranks and waits until they end.

It makes one connection to node 0 for each rank, and passes it to the rank's process. So worker processes run the same
program on all nodes, and never get the cluster's token.
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
LAST_RANKS_SECONDS = 10.0  # when one rank of the node has ended, the others must end within this time


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

    Raises:
        ConfigError: the arguments do not fit together, or node 0 refuses them.
        EngineError: node 0 does not answer.
        WorkerDiedError: a rank of this node ended before the executor told it to end.
    """
    layout = RankLayout(args.tensor_parallel_size, args.pipeline_parallel_size)
    ranks = ranks_of_node(layout.world_size, args.nnodes, args.node_rank)
    if args.node_rank == 0:
        raise ConfigError(
            "node 0 runs the engine itself (LLM(...), inflight generate); start `inflight worker` only on the other nodes"
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
    finally:  # also after an interrupt
        stop_processes(processes, 0.0)
        for process in processes:
            process.close()
    for rank, process in zip(ranks, processes, strict=True):
        if process.exit_code == EXIT_STREAM_ENDED:
            raise WorkerDiedError(f"rank {rank} has lost node 0: the engine has died, or the link broke", rank=rank)
        if process.exit_code != 0:
            raise WorkerDiedError(f"rank {rank}: {process.state}", rank=rank)
