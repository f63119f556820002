"""Which engine `LLM` has, and which class runs its calls."""

from typing import TYPE_CHECKING

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.entrypoints.offline_engine import OfflineEngine

if TYPE_CHECKING:
    from inflight.entrypoints.llm import Call


def make_engine(args: EngineArgs) -> OfflineEngine:
    if args.data_parallel_size == 1:
        return LLMEngine.from_args(args)
    from inflight.entrypoints.replicated_engine import ReplicatedEngine  # needs msgspec, which one engine does not

    return ReplicatedEngine(args)


def call_type(engine: OfflineEngine) -> "type[Call]":
    from inflight.entrypoints.image_call import ImageCall  # it imports llm.py, which imports this file
    from inflight.entrypoints.llm import Call

    return Call if engine.model_config.architecture.vision is None else ImageCall
