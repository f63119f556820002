"""`make_engine`: the engine that `LLM` has."""

from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.entrypoints.offline_engine import OfflineEngine


def make_engine(arguments: dict[str, Any]) -> OfflineEngine:  # Any: `EngineArgs` checks every value
    """
    Raises:
        ConfigError: an argument is unknown, or it does not fit the model or the machine.
    """
    args = EngineArgs.from_kwargs(arguments)
    if args.data_parallel_size == 1:
        return LLMEngine.from_args(args)
    from inflight.entrypoints.replicated_engine import ReplicatedEngine  # needs msgspec, which one engine does not

    return ReplicatedEngine(args)
