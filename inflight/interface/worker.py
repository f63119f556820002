"""`Worker`: what an executor drives, one per rank. The real one is `inflight.worker.worker`; tests bring their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput


class WorkerBase(ABC):
    """One rank. All methods are called from one thread, in the order in which the executor was called.

    Any public method can be called by `Executor.collective_rpc` under its name.
    """

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights. Idempotent."""

    @abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> spec, in layer order, for the layers of this rank."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes free for the KV cache, after a profile run at the largest batch; not positive when none are. Idempotent."""

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the arena, bind it to the layers, warm up. Idempotent for an equal config."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""

    @abstractmethod
    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one token that belongs to no request; touches no request's cache."""

    def check_health(self) -> None:
        """Raise if this rank cannot serve. The default: a rank that answers is healthy."""

    def shutdown(self) -> None:
        """Free what the rank holds. Idempotent."""
