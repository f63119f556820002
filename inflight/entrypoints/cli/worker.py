"""`inflight worker`: the ranks of one node of an engine that runs on node 0 of several."""

from __future__ import annotations

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import command
from inflight.entrypoints.cli.engine_options import (
    MasterAddress,
    MasterPort,
    NodeRank,
    NumNodes,
    PipelineParallelSize,
    TensorParallelSize,
)

EPILOG = """\b
Example, with INFLIGHT_CLUSTER_TOKEN set to the same secret on both machines:
  node 0:  inflight generate -m /models/m -p Hello -tp 2 --nnodes 2 --master-address 10.0.0.1
  node 1:  inflight worker -tp 2 --nnodes 2 --node-rank 1 --master-address 10.0.0.1

The model must be in the same folder on all nodes. Everything else is told by node 0. The command ends with the engine.
"""


@command
def worker(
    nnodes: NumNodes,
    node_rank: NodeRank,
    master_addr: MasterAddress,
    master_port: MasterPort = 29501,
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
) -> None:
    """Run this node's ranks of an engine that is split over several machines."""
    sizes = EngineArgs(  # it knows the bounds
        nnodes=nnodes,
        master_addr=master_addr,
        master_port=master_port,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    from inflight.executor.node import NodeArgs, run_node  # loads numpy, which `--help` does not need

    run_node(
        NodeArgs(
            nnodes=sizes.nnodes,
            node_rank=node_rank,
            master_addr=sizes.master_addr,
            master_port=sizes.master_port,
            tensor_parallel_size=sizes.tensor_parallel_size,
            pipeline_parallel_size=sizes.pipeline_parallel_size,
        )
    )
