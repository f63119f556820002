"""`inflight worker`: runs the ranks of one machine, if an engine is split over several machines (nodes).

Node 0 runs the engine and its own ranks, for example with `inflight generate`. Every other node runs this command.
"""

from typing import Annotated, Any

from inflight import envs
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import LogFormat, command, set_log_level
from inflight.entrypoints.cli.options import Options

_SIZES = ("nnodes", "node_rank", "master_addr", "master_port", "tensor_parallel_size", "pipeline_parallel_size")

EPILOG = """\b
Example, with INFLIGHT_CLUSTER_TOKEN set to the same secret on both machines:
  node 0:  inflight generate -m /models/m -p Hello -tp 2 --nnodes 2 --master-address 10.0.0.1
  node 1:  inflight worker -tp 2 --nnodes 2 --node-rank 1 --master-address 10.0.0.1

The model must be in the same folder on all nodes. Node 0 sends all other settings. The command ends when the engine ends.
"""


@command
def worker(
    log_format: LogFormat = None,
    *,
    sizes: Annotated[dict[str, Any], Options(EngineArgs, only=_SIZES, required=_SIZES[:3])],
) -> None:
    """Run this node's ranks of an engine that is split over several machines."""
    if log_format is not None:
        set_log_level(envs.log_level(), log_format.value)
    # `EngineArgs` raises if a size is out of bounds. It accepts only node_rank=0; `run_node` checks the real `node_rank`.
    EngineArgs(**{**sizes, "node_rank": 0})
    from inflight.executor.node import NodeArgs, run_node  # loads numpy, which `--help` does not need

    run_node(NodeArgs(**sizes))
