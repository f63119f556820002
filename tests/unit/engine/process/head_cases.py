"""A head that waits for replica 1 of two, and the configuration of the machine of replica 1."""

from __future__ import annotations

from dataclasses import replace

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.engine.process.remote_replica import RemoteReplica, RemoteReplicas
from tests.conformance.configs import engine_config

TOKEN = "a long random text"
TERMS = {"dtype": "float32", "SHA-256 of model.safetensors": "ab12"}


def head_of(port: int) -> tuple[RemoteReplicas, RemoteReplica]:
    """To be called on the event loop. It does not accept connections before `start`."""
    args = EngineArgs(
        data_parallel_size=2, data_parallel_size_local=1, data_parallel_address="127.0.0.1", data_parallel_rpc_port=port
    )
    acceptor = RemoteReplicas(args, engine_config(), TERMS)
    [replica] = acceptor.replicas.values()
    return acceptor, replica


def config_of_replica(
    port: int, number: int = 1, terms: dict[str, str] | None = None, seconds: float = 60.0, headless: str = "one"
) -> EngineConfig:
    """`seconds`: how long it looks for a lost head. `headless`: the name of its process."""
    config = engine_config()
    head = "127.0.0.1", port
    parallel = replace(config.parallel, replicas=(number,), head=head, terms=terms or TERMS, headless=headless)
    faults = FaultToleranceConfig(engine_recovery_timeout_sec=seconds)
    return replace(config, parallel=parallel, fault_tolerance=faults)
